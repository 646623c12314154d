// TMA (PTX ISA, "cp.async.bulk.tensor"; sm_90): one thread has a box of a tensor copied into shared
// memory. What lies outside the tensor arrives as zeros and counts like the rest.
#pragma once

#include <cstdint>

namespace autofa {

// What cuTensorMapEncodeTiled makes of a tensor and a box: opaque. A kernel gets it as part of a
// __grid_constant__ parameter.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// Brings a map into the cache that the copies read it from.
__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}

// Starts copying the box at (x, y, z, w), x the innermost, to `target`, which is aligned to 128
// bytes, or 1024 where the map swizzles by 128. The bytes count at `barrier` as they land.
__device__ __forceinline__ void tma_load(uint32_t target, const TensorMap& map, uint32_t barrier,
                                         int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// The same of a tensor of five dimensions.
__device__ __forceinline__ void tma_load(uint32_t target, const TensorMap& map, uint32_t barrier,
                                         int x, int y, int z, int v, int w) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];\n" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(v), "r"(w)
      : "memory");
}

}  // namespace autofa
