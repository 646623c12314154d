// mbarrier (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier"; sm_90):
// barriers in shared memory that count arrivals of threads and bytes of asynchronous copies.
//
// A phase is complete once all arrivals have come and all announced bytes have landed; the next one
// then begins. Phases are waited for by their parity: the first has 0. A wait for parity 1 on a
// fresh barrier returns at once.
#pragma once

#include <cstdint>

namespace autofa {

constexpr int kMbarrierBytes = 8;

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals)
               : "memory");
}

// After the initialisation, by the thread that did it: makes it visible to the asynchronous copies
// and to the cluster. The threads' own barrier comes after it.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for so many more bytes.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at a barrier of another thread block of the cluster, by its map_to_rank() address. Orders
// nothing: that block sees this thread's writes only after a release at the cluster's scope, a
// fence of all memory, and loads before it may still be under way. Who says with it that a buffer
// has been read must have used what was loaded.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// How often a wait is tried, each time for as long as the hardware sees fit, before the kernel is
// given up: a lost arrival then is an error and no hang.
constexpr uint32_t kMbarrierTries = 1u << 24;

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#pragma unroll 1
  for (uint32_t tries = 0;; ++tries) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return;
    if (tries == kMbarrierTries) __trap();
  }
}

// For what other thread blocks of the cluster wrote before they arrived.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
#pragma unroll 1
  for (uint32_t tries = 0;; ++tries) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return;
    if (tries == kMbarrierTries) __trap();
  }
}

}  // namespace autofa
