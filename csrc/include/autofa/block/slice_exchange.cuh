// What the same warpgroup of the thread blocks of a cluster sends to the others, each of which has
// a slice of the head dim: sums over its slice of the scores, of 16 keys for each of the others;
// then weights of its own 16 keys, as they lie in its registers, which are the operands of the
// others' products as they are; and row sums.
//
// Weights are sent `Lag` steps before they are used, and the scores one step before that. Of scores
// two buffers take turns, of weights Lag + 1, and nothing says that one is free. Who sends the
// scores of step j + 2 has got those of step j + 1 from all others, who had read the ones of step
// j; who sends the weights of step j + Lag has got the scores of that step, from others who had
// read the weights of step j - 1. Row sums, which end a tile, have one buffer for the same reason.
#pragma once

#include <cstdint>

#include "autofa/arch/cluster.cuh"
#include "autofa/arch/mbarrier.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/arch/warpgroup.cuh"

namespace autofa {

// Of 64 rows, among `Ranks` blocks. What comes from the block s + 1 ranks further on, modulo Ranks,
// lies in slot s.
template <int Ranks, int Lag>
class SliceExchange {
  static constexpr int others = Ranks - 1;
  static constexpr int score_bytes = 64 * 16 * 4, weight_bytes = 64 * 16 * 2, row_bytes = 64 * 4;
  static constexpr int weight_sets = Lag + 1;
  static constexpr int shifts = others * (2 * score_bytes + weight_sets * weight_bytes);
  static constexpr int sums = shifts + others * weight_sets * row_bytes;
  static constexpr int own_weights = sums + others * row_bytes;

 public:
  static constexpr int bytes = own_weights + Lag * weight_bytes;
  static constexpr int barrier_bytes = (3 + weight_sets) * kMbarrierBytes;

  // Of a step, by slot, with two floats of row lane / 4 and lane / 4 + 8 of each warp's 16.
  struct Rows {
    float of[others][2];
  };

  // By one thread, before its mbarrier_init_fence().
  static __device__ __forceinline__ void init(uint32_t barriers) {
    for (int i = 0; i < 3 + weight_sets; ++i) mbarrier_init(barriers + i * kMbarrierBytes, 1);
  }

  // Buffers and barriers lie at the same place in all blocks; `rank` is this one's.
  __device__ __forceinline__ SliceExchange(uint32_t buffers, uint32_t barriers, int rank)
      : buffers_(buffers), barriers_(barriers), rank_(rank) {
    for (uint32_t i = 0; i < 2; ++i) expect(scores_full(i), others * score_bytes);
    for (uint32_t i = 0; i < weight_sets; ++i) {
      expect(weights_full(i), others * (weight_bytes + row_bytes));
    }
    expect(sums_full(), others * row_bytes);
  }

  // Sends each other block the scores of its 16 keys, and keeps those of this one in `own`.
  __device__ __forceinline__ void send_scores(uint32_t step, const float (&scores)[2 * Ranks][4],
                                              float (&own)[2][4]) const {
    const uint32_t buffer = (begun_ + step) % 2;
#pragma unroll
    for (int rank = 0; rank < Ranks; ++rank) {
      if (rank == rank_) {
#pragma unroll
        for (int i = 0; i < 8; ++i) own[i / 4][i % 4] = scores[2 * rank + i / 4][i % 4];
        continue;
      }
      const uint32_t target = map_to_rank(scores_at(buffer, slot_at(rank)), rank);
      const uint32_t full = map_to_rank(scores_full(buffer), rank);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float (&tile)[4] = scores[2 * rank + n];
        const uint32_t words[4] = {__float_as_uint(tile[0]), __float_as_uint(tile[1]),
                                   __float_as_uint(tile[2]), __float_as_uint(tile[3])};
        store_async_16(target + n * kWarpgroupThreads * 16, words, full);
      }
    }
  }

  // Adds what the others have for this block's keys.
  __device__ __forceinline__ void add_scores(uint32_t step, float (&own)[2][4]) const {
    const uint32_t message = begun_ + step, buffer = message % 2;
    mbarrier_wait_cluster(scores_full(buffer), message / 2 % 2);
#pragma unroll
    for (int slot = 0; slot < others; ++slot) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t words[4];
        load_shared_16(words, scores_at(buffer, slot) + n * kWarpgroupThreads * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) own[n][i] += __uint_as_float(words[i]);
      }
    }
    expect(scores_full(buffer), others * score_bytes);
  }

  // This block's weights: to the others, and to where it gets them from again itself.
  __device__ __forceinline__ void send_weights(uint32_t step, const uint32_t (&weights)[4],
                                               float first, float second) const {
    const uint32_t buffer = (begun_ + step) % weight_sets;
    store_shared_16(own_weights_at(step), weights);
    for_each_other([&](int rank, int slot) {
      const uint32_t full = map_to_rank(weights_full(buffer), rank);
      store_async_16(map_to_rank(weights_at(buffer, slot), rank), weights, full);
      send_rows(map_to_rank(shifts_at(buffer, slot), rank), full, first, second);
    });
  }

  // All weights of a step: this block's, and the others' from weights[1] on by slot.
  __device__ __forceinline__ void receive_weights(uint32_t step, uint32_t (&weights)[Ranks][4],
                                                  Rows& shifts) const {
    const uint32_t message = begun_ + step, buffer = message % weight_sets;
    load_shared_16(weights[0], own_weights_at(step));
    mbarrier_wait_cluster(weights_full(buffer), message / weight_sets % 2);
#pragma unroll
    for (int slot = 0; slot < others; ++slot) {
      load_shared_16(weights[slot + 1], weights_at(buffer, slot));
      load_rows(shifts.of[slot], shifts_at(buffer, slot));
    }
    expect(weights_full(buffer), others * (weight_bytes + row_bytes));
  }

  // Of the row sums, which end a tile of so many steps: sends this block's and gets the others'.
  __device__ __forceinline__ void finish(int steps, float first, float second, Rows& sums) {
    for_each_other([&](int rank, int slot) {
      send_rows(map_to_rank(sums_at(slot), rank), map_to_rank(sums_full(), rank), first, second);
    });
    mbarrier_wait_cluster(sums_full(), tiles_ % 2);
#pragma unroll
    for (int slot = 0; slot < others; ++slot) load_rows(sums.of[slot], sums_at(slot));
    expect(sums_full(), others * row_bytes);
    ++tiles_;
    begun_ += steps;
  }

 private:
  static __device__ __forceinline__ uint32_t thread() { return threadIdx.x % kWarpgroupThreads; }

  // This block's slot at another.
  __device__ __forceinline__ int slot_at(int rank) const {
    return (rank_ - rank - 1 + Ranks) % Ranks;
  }

  template <class Send>
  __device__ __forceinline__ void for_each_other(Send send) const {
#pragma unroll
    for (int i = 1; i < Ranks; ++i) send((rank_ + i) % Ranks, others - i);
  }

  __device__ __forceinline__ uint32_t scores_full(uint32_t buffer) const {
    return barriers_ + buffer * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t weights_full(uint32_t buffer) const {
    return barriers_ + (3 + buffer) * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t sums_full() const { return barriers_ + 2 * kMbarrierBytes; }

  __device__ __forceinline__ uint32_t scores_at(uint32_t buffer, int slot) const {
    return buffers_ + (buffer * others + slot) * score_bytes + thread() * 16;
  }
  __device__ __forceinline__ uint32_t weights_at(uint32_t buffer, int slot) const {
    return buffers_ + others * 2 * score_bytes + (buffer * others + slot) * weight_bytes +
           thread() * 16;
  }
  static __device__ __forceinline__ uint32_t row_offset() {
    return (thread() / 32 * 16 + thread() % 32 / 4) * 4;
  }
  __device__ __forceinline__ uint32_t shifts_at(uint32_t buffer, int slot) const {
    return buffers_ + shifts + (buffer * others + slot) * row_bytes + row_offset();
  }
  __device__ __forceinline__ uint32_t sums_at(int slot) const {
    return buffers_ + sums + slot * row_bytes + row_offset();
  }
  __device__ __forceinline__ uint32_t own_weights_at(uint32_t step) const {
    return buffers_ + own_weights + step % Lag * weight_bytes + thread() * 16;
  }

  // To addresses in another block.
  static __device__ __forceinline__ void send_rows(uint32_t target, uint32_t full, float first,
                                                   float second) {
    if (threadIdx.x % 4 != 0) return;
    store_async_4(target, __float_as_uint(first), full);
    store_async_4(target + 8 * 4, __float_as_uint(second), full);
  }

  static __device__ __forceinline__ void load_rows(float (&rows)[2], uint32_t at) {
    rows[0] = __uint_as_float(load_shared_4(at));
    rows[1] = __uint_as_float(load_shared_4(at + 8 * 4));
  }

  // The next message may land before this, and even before it is expected: the phase it counts in
  // waits for this arrival.
  static __device__ __forceinline__ void expect(uint32_t barrier, int bytes) {
    if (thread() == 0) mbarrier_arrive_expect(barrier, bytes);
  }

  const uint32_t buffers_, barriers_;
  const int rank_;
  uint32_t begun_ = 0, tiles_ = 0;  // steps and tiles that came before
};

}  // namespace autofa
