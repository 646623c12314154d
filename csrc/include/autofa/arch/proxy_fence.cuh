// fence.proxy.async (PTX ISA, "membar, fence"; sm_90): wgmma and TMA reach shared memory by a way
// of their own, which does not see a thread's plain stores before this fence.
#pragma once

namespace autofa {

// By each thread that stored, before the barrier after which others have its stores read.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

}  // namespace autofa
