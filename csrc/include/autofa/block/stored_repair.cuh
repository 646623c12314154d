// Rows whose stored output is not finite, worked out anew: the registers of the products are too
// few to keep what that needs, and it is needed rarely.
#pragma once

#include "autofa/block/row_repair.cuh"
#include "autofa/block/scheduler.cuh"
#include "autofa/block/warpgroup_rows.cuh"

namespace autofa {

// The rows of warpgroup `index` of a tile, in the columns [first, end) of the output. Keys were
// taken in steps of `key_step`.
template <class C>
__device__ __forceinline__ void repair_stored_rows(const autofa_params& call, const RowTile& at,
                                                   int index, int first, int end, int key_step) {
  __syncwarp();  // the stores of all lanes come before those of the repair
  constexpr int passes = (C::head_dim + 255) / 256;
  const int rows = static_cast<int>(call.seqlen_q), first_row = at.first_row + index * 64;
  const typename C::Mask mask(call, at.batch, at.head_q);
  const RowRepair<typename C::Element, passes> repairer(call, at.batch, at.head_q, at.head_kv,
                                                        first, end);
  const KeyTiles tiles(mask, first_row, 64, rows, key_step);
  const int end_key = min(tiles.end * key_step, static_cast<int>(call.seqlen_k));
  const int end_row = min(first_row + warp_row() + 16, rows);
#pragma unroll 1
  for (int row = first_row + warp_row(); row < end_row; ++row) {
    if (!repairer.stored_nonfinite(row)) continue;
    const int visible = mask(row);
    repairer.repair(row, visible, end_key, repairer.log_sum(row, visible));
  }
}

}  // namespace autofa
