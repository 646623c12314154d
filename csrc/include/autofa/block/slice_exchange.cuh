// What the same warpgroup of the thread blocks of a cluster sends to the others, each of which has
// a slice of the head dim: sums over its slice of the scores, of 16 keys or more for each of the
// others; then weights of its own keys, as they lie in its registers, which are the operands of the
// others' products as they are; and row sums.
//
// Weights are sent `Lag` steps, 0 or 1, before they are used, and the scores one step before that.
// Of both there are Lag + 1 buffers, which take turns, and nothing says that one is free:
// - Who sends the weights of step j + Lag has got the scores of that step, from others who had read
//   the weights of step j - 1.
// - Who sends the scores of step j + 1 + Lag has got the weights of step j, from others who had
//   read the scores of step j.
// Row sums, which end a tile, have one buffer: who sends those of the next tile has got scores of
// that tile, from others who had read the ones of this.
#pragma once

#include <cstdint>

#include "autofa/arch/cluster.cuh"
#include "autofa/arch/mbarrier.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/arch/warpgroup.cuh"

namespace autofa {

// Of 64 rows, among `Ranks` blocks of `Squares` times 16 keys each. What comes from the block s + 1
// ranks further on, modulo Ranks, lies in slot s.
template <int Ranks, int Squares, int Lag, bool OwnFirst>
class SliceExchange {
  static constexpr int others = Ranks - 1, tiles = 2 * Squares;
  static constexpr int piece_bytes = kWarpgroupThreads * 16;  // that one store of all threads moves
  static constexpr int score_bytes = tiles * piece_bytes, weight_bytes = Squares * piece_bytes;
  static constexpr int row_bytes = 64 * 4;
  static constexpr int sets = Lag + 1;
  static constexpr int weights = others * sets * score_bytes;
  static constexpr int shifts = weights + others * sets * weight_bytes;
  static constexpr int sums = shifts + others * sets * row_bytes;
  static constexpr int own_weights = sums + others * row_bytes;

 public:
  static constexpr int bytes = own_weights + Lag * weight_bytes;
  static constexpr int barrier_count = 2 * sets + 1;
  static constexpr int barrier_bytes = barrier_count * kMbarrierBytes;

  // Of a step, by slot, with two floats of row lane / 4 and lane / 4 + 8 of each warp's 16.
  struct Rows {
    float of[others][2];
  };

  // By one thread, before its mbarrier_init_fence().
  static __device__ __forceinline__ void init(uint32_t barriers) {
    for (int i = 0; i < barrier_count; ++i) mbarrier_init(barriers + i * kMbarrierBytes, 1);
  }

  // Buffers and barriers lie at the same place in all blocks; `rank` is this one's.
  __device__ __forceinline__ SliceExchange(uint32_t buffers, uint32_t barriers, int rank)
      : buffers_(buffers), barriers_(barriers), rank_(rank) {
    for (uint32_t i = 0; i < sets; ++i) {
      expect(scores_full(i), others * score_bytes);
      expect(weights_full(i), others * (weight_bytes + row_bytes));
    }
    expect(sums_full(), others * row_bytes);
  }

  // Sends each other block the scores of its keys, and keeps those of this one in `own`. They lie
  // by rank, or with OwnFirst from this block's on.
  __device__ __forceinline__ void send_scores(uint32_t step,
                                              const float (&scores)[tiles * Ranks][4],
                                              float (&own)[tiles][4]) const {
    const uint32_t buffer = (begun_ + step) % sets;
    // 0, but not to the compiler: a plain copy it may put off until the next scores are under way
    // in these registers, and then wait for each product.
    const uint32_t none = static_cast<uint32_t>(rank_) / 16;
#pragma unroll
    for (int part = 0; part < Ranks; ++part) {
      const int rank = OwnFirst ? (rank_ + part) % Ranks : part;
      if (OwnFirst ? part == 0 : rank == rank_) {
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            own[n][i] = __uint_as_float(__float_as_uint(scores[tiles * part + n][i]) ^ none);
          }
        }
        continue;
      }
      const uint32_t target = map_to_rank(scores_at(buffer, slot_at(rank)), rank);
      const uint32_t full = map_to_rank(scores_full(buffer), rank);
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        const float (&tile)[4] = scores[tiles * part + n];
        const uint32_t words[4] = {__float_as_uint(tile[0]), __float_as_uint(tile[1]),
                                   __float_as_uint(tile[2]), __float_as_uint(tile[3])};
        store_async_16(target + n * piece_bytes, words, full);
      }
    }
  }

  // Adds what the others have for this block's keys.
  __device__ __forceinline__ void add_scores(uint32_t step, float (&own)[tiles][4]) const {
    const uint32_t message = begun_ + step, buffer = message % sets;
    mbarrier_wait_cluster(scores_full(buffer), message / sets % 2);
#pragma unroll
    for (int slot = 0; slot < others; ++slot) {
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        uint32_t words[4];
        load_shared_16(words, scores_at(buffer, slot) + n * piece_bytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) own[n][i] += __uint_as_float(words[i]);
      }
    }
    expect(scores_full(buffer), others * score_bytes);
  }

  // This block's weights, the first squares of `weights`: to the others.
  template <int Count>
  __device__ __forceinline__ void send_weights(uint32_t step, const uint32_t (&weights)[Count][4],
                                               float first, float second) const {
    const uint32_t buffer = (begun_ + step) % sets;
    for_each_other([&](int rank, int slot) {
      const uint32_t full = map_to_rank(weights_full(buffer), rank);
      const uint32_t target = map_to_rank(weights_at(buffer, slot), rank);
#pragma unroll
      for (int k = 0; k < Squares; ++k) store_async_16(target + k * piece_bytes, weights[k], full);
      send_rows(map_to_rank(shifts_at(buffer, slot), rank), full, first, second);
    });
  }

  // Puts this block's weights down until they are used, where that is in a later step.
  __device__ __forceinline__ void keep_weights(const uint32_t (&weights)[Squares][4]) const {
#pragma unroll
    for (int k = 0; k < Squares; ++k) {
      store_shared_16(own_weights_at() + k * piece_bytes, weights[k]);
    }
  }

  // All weights of a step: this block's, which stay as they are without a lag, and after them the
  // others' by slot.
  __device__ __forceinline__ void receive_weights(uint32_t step,
                                                  uint32_t (&weights)[Ranks * Squares][4],
                                                  Rows& shifts) const {
    const uint32_t message = begun_ + step, buffer = message % sets;
    if constexpr (Lag > 0) {
#pragma unroll
      for (int k = 0; k < Squares; ++k) {
        load_shared_16(weights[k], own_weights_at() + k * piece_bytes);
      }
    }
    mbarrier_wait_cluster(weights_full(buffer), message / sets % 2);
#pragma unroll
    for (int slot = 0; slot < others; ++slot) {
#pragma unroll
      for (int k = 0; k < Squares; ++k) {
        load_shared_16(weights[(slot + 1) * Squares + k],
                       weights_at(buffer, slot) + k * piece_bytes);
      }
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
    return barriers_ + (sets + buffer) * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t sums_full() const {
    return barriers_ + 2 * sets * kMbarrierBytes;
  }

  __device__ __forceinline__ uint32_t scores_at(uint32_t buffer, int slot) const {
    return buffers_ + (buffer * others + slot) * score_bytes + thread() * 16;
  }
  __device__ __forceinline__ uint32_t weights_at(uint32_t buffer, int slot) const {
    return buffers_ + weights + (buffer * others + slot) * weight_bytes + thread() * 16;
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
  __device__ __forceinline__ uint32_t own_weights_at() const {
    return buffers_ + own_weights + thread() * 16;
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
