// The ring of buffers in which one thread has TMA write chunks of keys and values, and warpgroups
// read them in the same order. A buffer is full once its bytes have landed, and free again once
// every reading warp has released it.
#pragma once

#include <cstdint>

#include "autofa/arch/mbarrier.cuh"

namespace autofa {

template <int Stages, int StageBytes>
struct ChunkRing {
  static_assert(StageBytes % 1024 == 0, "chunks are swizzled");
  static constexpr int bytes = Stages * StageBytes;
  static constexpr int barrier_bytes = 2 * Stages * kMbarrierBytes;

  uint32_t chunks, barriers;  // in shared memory

  __device__ __forceinline__ uint32_t chunk(int stage) const { return chunks + stage * StageBytes; }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return barriers + stage * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t free(int stage) const { return full(Stages + stage); }

  // By one thread, before its mbarrier_init_fence().
  __device__ __forceinline__ void init(int reading_warps) const {
#pragma unroll 1
    for (int stage = 0; stage < Stages; ++stage) {
      mbarrier_init(full(stage), 1);
      mbarrier_init(free(stage), reading_warps);
    }
  }

  struct Place {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
      if (++stage == Stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };

  // The thread that writes.
  class Writer {
   public:
    __device__ __forceinline__ explicit Writer(const ChunkRing& ring) : ring_(ring) {}

    // Waits for a free buffer; load(target, barrier) starts copies of `bytes` into it.
    template <class Load>
    __device__ __forceinline__ void write(int bytes, Load load) {
      mbarrier_wait(ring_.free(next_.stage), next_.parity ^ 1);
      mbarrier_arrive_expect(ring_.full(next_.stage), bytes);
      load(ring_.chunk(next_.stage), ring_.full(next_.stage));
      next_.advance();
    }

   private:
    const ChunkRing ring_;
    Place next_;
  };

  // A thread that reads. Chunks are released in the order in which they were taken.
  class Reader {
   public:
    __device__ __forceinline__ explicit Reader(const ChunkRing& ring) : ring_(ring) {}

    // Waits for the next chunk, and takes it.
    __device__ __forceinline__ uint32_t take() {
      mbarrier_wait(ring_.full(next_.stage), next_.parity);
      const uint32_t chunk = ring_.chunk(next_.stage);
      next_.advance();
      return chunk;
    }

    // By all lanes of a warp, of which none reads the oldest chunk any more.
    __device__ __forceinline__ void release() {
      if (threadIdx.x % 32 == 0) mbarrier_arrive(ring_.free(oldest_));
      oldest_ = oldest_ + 1 == Stages ? 0 : oldest_ + 1;
    }

    // Takes chunks that it does not need. Each must be seen to be full before it is released, else
    // the release would count for the time before.
    __device__ __forceinline__ void skip(int chunks) {
#pragma unroll 1
      for (; chunks > 0; --chunks) {
        take();
        release();
      }
    }

   private:
    const ChunkRing ring_;
    Place next_;
    int oldest_ = 0;
  };
};

template <int Value>
struct Constant {
  static constexpr int value = Value;
};

// Calls f(Constant<0>), f(Constant<1>) ...
template <int Count, int At = 0, class Function>
__device__ __forceinline__ void for_each_chunk(Function f) {
  if constexpr (At < Count) {
    f(Constant<At>{});
    for_each_chunk<Count, At + 1>(f);
  }
}

}  // namespace autofa
