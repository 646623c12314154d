// What the same warpgroup of the two thread blocks of a cluster sends to the other: weights as they
// lie in its registers, which are the operands of the other's products as they are, and row sums.
//
// For the weights there is one buffer, which its readers say is free: a second one would take the
// memory of a chunk. They read it at the begin of a step, and it is written to again at the end.
// Of the sums two buffers take turns, and nothing says that one is free: whoever writes to it has
// got those of the tile before, which were sent after it had been read.
#pragma once

#include <cmath>
#include <cstdint>

#include "autofa/arch/cluster.cuh"
#include "autofa/arch/mbarrier.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/arch/warpgroup.cuh"
#include "autofa/block/pair_softmax.cuh"

namespace autofa {

// Weights of 64 rows and 64 keys, in four squares of 16 keys, with two floats of row lane / 4 and
// row lane / 4 + 8 of each warp's 16.
class PairExchange {
  static constexpr int weight_bytes = 64 * 64 * 2, row_bytes = 64 * 4;

 public:
  static constexpr int bytes = weight_bytes + 3 * row_bytes;
  static constexpr int barrier_bytes = 4 * kMbarrierBytes;

  // By one thread, before its mbarrier_init_fence().
  static __device__ __forceinline__ void init(uint32_t barriers) {
    for (int i = 0; i < 4; ++i) mbarrier_init(barriers + i * kMbarrierBytes, i == 1 ? 4 : 1);
  }

  // Buffers and barriers lie at the same place in both blocks; `peer` is the other's rank.
  __device__ __forceinline__ PairExchange(uint32_t buffers, uint32_t barriers, uint32_t peer)
      : buffers_(buffers), barriers_(barriers), peer_(peer) {
    expect(weights_full(), weight_bytes + row_bytes);
    for (uint32_t i = 0; i < 2; ++i) expect(sums_full(i), row_bytes);
  }

  __device__ __forceinline__ void send_weights(const uint32_t (&weights)[4][4], float first,
                                               float second) {
    mbarrier_wait_cluster(weights_free(), state_ % 2 ^ 1);
    const uint32_t full = map_to_rank(weights_full(), peer_);
    const uint32_t target = map_to_rank(weights_at(), peer_);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      store_async_16(target + i * kWarpgroupThreads * 16, weights[i], full);
    }
    send_rows(shifts_at(), weights_full(), first, second);
    state_ ^= 1;
  }

  __device__ __forceinline__ void receive_weights(uint32_t (&weights)[4][4], float (&rows)[2]) {
    mbarrier_wait_cluster(weights_full(), state_ / 2 % 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_shared_16(weights[i], weights_at() + i * kWarpgroupThreads * 16);
    }
    load_rows(rows, shifts_at());
    expect(weights_full(), weight_bytes + row_bytes);
    // The arrival at the other block does not wait for loads before it, which wait for shared
    // memory while products read it: on an H200 weights were overwritten that were still to be
    // read. So its address takes part of what was loaded: whether a weight is negative or a shift
    // no number, which none is.
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) any |= weights[i / 4][i % 4];
    any = any >> 31 | std::isnan(rows[0]) | std::isnan(rows[1]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive_remote(map_to_rank(weights_free() + any, peer_));
    state_ ^= 2;
  }

  // Adds the other block's row sums to those of this one, which end a tile.
  __device__ __forceinline__ void finish(PairSoftmax& softmax) {
    const float own[2] = {softmax.finish(0), softmax.finish(1)};
    const uint32_t tile = state_ / 4;
    send_rows(sums_at(tile), sums_full(tile), own[0], own[1]);
    mbarrier_wait_cluster(sums_full(tile), tile / 2 % 2);
    float peers[2];
    load_rows(peers, sums_at(tile));
    softmax.add(0, peers[0]);
    softmax.add(1, peers[1]);
    expect(sums_full(tile), row_bytes);
    state_ += 4;
  }

 private:
  static __device__ __forceinline__ uint32_t thread() { return threadIdx.x % kWarpgroupThreads; }

  __device__ __forceinline__ uint32_t weights_full() const { return barriers_; }
  // Of the other block's buffer.
  __device__ __forceinline__ uint32_t weights_free() const { return barriers_ + kMbarrierBytes; }
  __device__ __forceinline__ uint32_t sums_full(uint32_t message) const {
    return barriers_ + (2 + message % 2) * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t weights_at() const { return buffers_ + thread() * 16; }
  __device__ __forceinline__ uint32_t rows_at(uint32_t buffer) const {
    return buffers_ + weight_bytes + buffer * row_bytes +
           (thread() / 32 * 16 + thread() % 32 / 4) * 4;
  }
  __device__ __forceinline__ uint32_t shifts_at() const { return rows_at(0); }
  __device__ __forceinline__ uint32_t sums_at(uint32_t message) const {
    return rows_at(1 + message % 2);
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
  // In one register: bit 0 is the number of weights sent, bit 1 that of those received, both modulo
  // 2; the tiles count from bit 2 on.
  uint32_t state_ = 0;
};

}  // namespace autofa
