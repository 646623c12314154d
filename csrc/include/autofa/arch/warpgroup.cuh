// Warpgroups (PTX ISA, "setmaxnreg", "barrier"; sm_90a): 128 threads that issue wgmma together, and
// may take registers over from each other.
#pragma once

#include <cstdint>

namespace autofa {

constexpr int kWarpgroupThreads = 128;

// The thread's warpgroup, as a value that the compiler knows to be the same for the whole warp.
__device__ __forceinline__ int warpgroup_index() {
  return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
}

// Gives registers back, down to `Count` a thread: by all threads of the warpgroup.
template <int Count>
__device__ __forceinline__ void release_registers() {
  static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256, "what setmaxnreg takes");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Count) : "memory");
}

// Takes registers, up to `Count` a thread, as soon as others have given back as many.
template <int Count>
__device__ __forceinline__ void take_registers() {
  static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256, "what setmaxnreg takes");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Count) : "memory");
}

// A barrier of `threads` threads, whole warps. Number 0 is __syncthreads's; there are 16.
__device__ __forceinline__ void named_barrier_sync(int number, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;\n" ::"r"(number), "r"(threads) : "memory");
}

// Counts as arrived without waiting.
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
  asm volatile("barrier.arrive.aligned %0, %1;\n" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace autofa
