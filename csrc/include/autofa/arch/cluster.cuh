// Clusters (PTX ISA, "barrier.cluster", "mapa", "st.async"; sm_90): thread blocks that run at the
// same time on neighbouring SMs and write into each other's shared memory.
#pragma once

#include <cstdint>

namespace autofa {

// The thread block's number within its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

// The barrier of all threads of the cluster in its two halves. What was written before the first is
// visible after the second.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// Needed after the barriers' initialisation, before another block arrives there, and at the end, so
// that no block is gone while others still write to it.
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// What lies at `address` of this block's shared memory, in the block `rank`.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Starts storing to another block's shared memory. The bytes count at `barrier`, which is of the
// same block, as they land; both by their map_to_rank() addresses.
__device__ __forceinline__ void store_async_16(uint32_t target, const uint32_t (&words)[4],
                                               uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];\n" ::"r"(target),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_async_4(uint32_t target, uint32_t word, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];\n" ::"r"(target),
      "r"(word), "r"(barrier)
      : "memory");
}

}  // namespace autofa
