// What the same warpgroup of the two thread blocks of a cluster sends to the other: weights as they
// lie in its registers, which are the operands of the other's products as they are, and row sums.
//
// Of each kind two buffers take turns, and nothing says that one is free: whoever writes to it has
// got a message that was sent after it had been read. For the weights that is the other block's of
// the step before, sent after products whose operands were what had been read; for the sums, which
// end a tile, those of the tile before.
//
// One buffer of weights that its readers call free, for the memory of a chunk, gave wrong outputs
// on an H200: an arrival at the other block's barrier does not wait for the loads before it, and
// they for their turn at shared memory, which the products of keys read all the time.
#pragma once

#include <cstdint>

#include "autofa/arch/cluster.cuh"
#include "autofa/arch/mbarrier.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/arch/warpgroup.cuh"
#include "autofa/block/pair_softmax.cuh"

namespace autofa {

// Weights of 64 rows and a block's keys of a step, in squares of 16 keys, with two floats of row
// lane / 4 and row lane / 4 + 8 of each warp's 16.
template <int Squares>
class PairExchange {
  static constexpr int weight_bytes = 64 * 16 * Squares * 2, row_bytes = 64 * 4;

 public:
  static constexpr int bytes = 2 * (weight_bytes + 2 * row_bytes);
  static constexpr int barrier_bytes = 4 * kMbarrierBytes;

  // By one thread, before its mbarrier_init_fence().
  static __device__ __forceinline__ void init(uint32_t barriers) {
    for (int i = 0; i < 4; ++i) mbarrier_init(barriers + i * kMbarrierBytes, 1);
  }

  // Buffers and barriers lie at the same place in both blocks; `peer` is the other's rank.
  __device__ __forceinline__ PairExchange(uint32_t buffers, uint32_t barriers, uint32_t peer)
      : buffers_(buffers), barriers_(barriers), peer_(peer) {
    for (uint32_t i = 0; i < 2; ++i) {
      expect(weights_full(i), weight_bytes + row_bytes);
      expect(sums_full(i), row_bytes);
    }
  }

  __device__ __forceinline__ void send_weights(const uint32_t (&weights)[Squares][4], float first,
                                               float second) {
    const uint32_t full = map_to_rank(weights_full(sent_), peer_);
    const uint32_t target = map_to_rank(weights_at(sent_), peer_);
#pragma unroll
    for (int i = 0; i < Squares; ++i) {
      store_async_16(target + i * kWarpgroupThreads * 16, weights[i], full);
    }
    send_rows(shifts_at(sent_), weights_full(sent_), first, second);
    ++sent_;
  }

  __device__ __forceinline__ void receive_weights(uint32_t (&weights)[Squares][4],
                                                  float (&rows)[2]) {
    mbarrier_wait_cluster(weights_full(received_), received_ / 2 % 2);
#pragma unroll
    for (int i = 0; i < Squares; ++i) {
      load_shared_16(weights[i], weights_at(received_) + i * kWarpgroupThreads * 16);
    }
    load_rows(rows, shifts_at(received_));
    expect(weights_full(received_), weight_bytes + row_bytes);
    ++received_;
  }

  // Adds the other block's row sums to those of this one, which end a tile.
  __device__ __forceinline__ void finish(PairSoftmax& softmax) {
    const float own[2] = {softmax.finish(0), softmax.finish(1)};
    send_rows(sums_at(tiles_), sums_full(tiles_), own[0], own[1]);
    mbarrier_wait_cluster(sums_full(tiles_), tiles_ / 2 % 2);
    float peers[2];
    load_rows(peers, sums_at(tiles_));
    softmax.add(0, peers[0]);
    softmax.add(1, peers[1]);
    expect(sums_full(tiles_), row_bytes);
    ++tiles_;
  }

 private:
  static __device__ __forceinline__ uint32_t thread() { return threadIdx.x % kWarpgroupThreads; }

  __device__ __forceinline__ uint32_t weights_full(uint32_t message) const {
    return barriers_ + message % 2 * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t sums_full(uint32_t message) const {
    return barriers_ + (2 + message % 2) * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t weights_at(uint32_t message) const {
    return buffers_ + message % 2 * weight_bytes + thread() * 16;
  }
  __device__ __forceinline__ uint32_t rows_at(uint32_t buffer) const {
    return buffers_ + 2 * weight_bytes + buffer * row_bytes +
           (thread() / 32 * 16 + thread() % 32 / 4) * 4;
  }
  __device__ __forceinline__ uint32_t shifts_at(uint32_t message) const {
    return rows_at(message % 2);
  }
  __device__ __forceinline__ uint32_t sums_at(uint32_t message) const {
    return rows_at(2 + message % 2);
  }

  __device__ __forceinline__ void send_rows(uint32_t at, uint32_t barrier, float first,
                                            float second) const {
    if (threadIdx.x % 4 != 0) return;
    const uint32_t target = map_to_rank(at, peer_), full = map_to_rank(barrier, peer_);
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

  const uint32_t buffers_, barriers_, peer_;
  uint32_t sent_ = 0, received_ = 0, tiles_ = 0;
};

}  // namespace autofa
