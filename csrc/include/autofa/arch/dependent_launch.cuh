// Programmatic dependent launch (PTX ISA, "griddepcontrol"; sm_90): a kernel that was launched with
// leave to overlap is on its SMs when the one before it ends. On older ones these do nothing, and
// kernels follow each other.
#pragma once

namespace autofa {

// Lets such a next kernel start as soon as every block of this one has called it.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// Waits until the kernel before has ended, and its writes are seen.
__device__ __forceinline__ void wait_for_preceding_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

}  // namespace autofa
