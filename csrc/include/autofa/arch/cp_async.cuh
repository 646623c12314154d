// cp.async (sm_80): copies from global to shared memory that run behind the computation.
#pragma once

#include <cstdint>

namespace autofa {

// Starts copying 16 bytes; with `valid` false it writes 16 zero bytes and reads nothing.
__device__ __forceinline__ void cp_async_16(uint32_t target, const void* source,
                                            bool valid = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(target),
               "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most `Pending` of this thread's latest groups are still under way.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

}  // namespace autofa
