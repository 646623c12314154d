// What a warpgroup stores of its 64 rows of a tile.
#pragma once

#include "autofa/block/fragment_store.cuh"
#include "autofa/block/row_repair.cuh"
#include "autofa/block/scheduler.cuh"
#include "autofa/block/warpgroup_rows.cuh"
#include "row_softmax.cuh"

namespace autofa::hopper_split_q {

// Rows from `first_row` on of `out` and of the sums, of a finished softmax over `keys` keys; then
// those are repaired in which a hidden value may show.
template <class Element, class Mask, int Blocks>
__device__ __forceinline__ void store_tile(const float (&out)[Blocks][4], const RowSoftmax& softmax,
                                           const Mask& mask, const autofa_params& call,
                                           const RowTile& at, int first_row, int keys) {
  const int rows = static_cast<int>(call.seqlen_q);
  void* matrix = matrix_at(call.out, call.out_strides, at.batch, at.head_q);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + row_of_thread() + half * 8;
    store_row<Element>(out, half, softmax.normalizer(half),
                       static_cast<char*>(matrix) + row * call.out_strides[2] * 2,
                       static_cast<int>(call.head_dim_v), row < rows);
  }
  if (call.lse != nullptr) {
    float* sums = call.lse + (at.batch * call.heads_q + at.head_q) * rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + row_of_thread() + half * 8;
      if (threadIdx.x % 4 == 0 && row < rows) sums[row] = softmax.log_sum(0, half);
    }
  }
  if constexpr (Mask::hides_values) {
    const RowRepair<Element> repairer(call, at.batch, at.head_q, at.head_kv);
    // For the compiler, which cannot tell otherwise that a warp's loops in there end together, and
    // then has nothing in uniform registers, the products' descriptors neither.
    const int first = __shfl_sync(~0u, first_row + warp_row(), 0);
    const int end = __shfl_sync(~0u, min(keys, static_cast<int>(call.seqlen_k)), 0);
    repair_rows(repairer, out, softmax, mask, first, rows, end);
  }
}

}  // namespace autofa::hopper_split_q
