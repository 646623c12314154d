// The 64 query rows of a warpgroup: which of them a thread has, and what is done to them besides
// products.
#pragma once

#include <cstdint>

#include "autofa/abi.h"
#include "autofa/arch/proxy_fence.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/arch/warpgroup.cuh"
#include "autofa/block/scheduler.cuh"
#include "autofa/block/softmax.cuh"
#include "autofa/block/tile_queue.cuh"

namespace autofa {

// The first of the warp's 16 rows.
__device__ __forceinline__ int warp_row() {
  return static_cast<int>(threadIdx.x) % kWarpgroupThreads / 32 * 16;
}

// The first of the thread's two rows; the other is 8 further on.
__device__ __forceinline__ int row_of_thread() {
  return warp_row() + static_cast<int>(threadIdx.x) % 32 / 4;
}

// Changes the sign of 16-bit elements in shared memory that products will read, by the warpgroup.
// `barrier` is a named one.
__device__ __forceinline__ void negate_elements(uint32_t elements, int bytes, int barrier) {
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x) % kWarpgroupThreads * 16; at < bytes;
       at += kWarpgroupThreads * 16) {
    uint32_t words[4];
    load_shared_16(words, elements + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] ^= 0x80008000u;
    store_shared_16(elements + at, words);
  }
  fence_proxy_async();
  named_barrier_sync(barrier, kWarpgroupThreads);
}

// Zeros for the columns [first, end) of the warpgroup's rows from `first_row` on, 256 columns at
// most, and -inf for their log-sum-exp if `log_sums`. Not by way of the sums of products: ptxas
// would not let those overlap with anything then.
__device__ __forceinline__ void store_rows_without_keys(const autofa_params& call,
                                                        const RowTile& at, int first_row, int first,
                                                        int end, bool log_sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32, rows = static_cast<int>(call.seqlen_q);
  char* matrix = static_cast<char*>(matrix_at(call.out, call.out_strides, at.batch, at.head_q));
  const int64_t sequence = at.batch * call.heads_q + at.head_q;
  const int end_row = min(first_row + warp_row() + 16, rows);
#pragma unroll 1
  for (int row = first_row + warp_row(); row < end_row; ++row) {
    if (first + lane * 8 < end) {
      char* target = matrix + (row * call.out_strides[2] + first + lane * 8) * 2;
      *reinterpret_cast<uint4*>(target) = make_uint4(0, 0, 0, 0);
    }
    if (lane == 0 && log_sums && call.lse != nullptr) call.lse[sequence * rows + row] = -kInfinity;
  }
}

}  // namespace autofa
