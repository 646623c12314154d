// Query rows and keys are split over the warps of a block: of each tile, a warp sees its rows and
// its part of the keys, with a softmax and an output of its own; at the end they are merged. So a
// block of few rows still has many warps, and warps of 32 rows need no block of 128.
#pragma once

#include "autofa/abi.h"
#include "autofa/block/column_epilogue.cuh"
#include "autofa/block/fragments.cuh"
#include "autofa/block/launch.cuh"
#include "autofa/block/mask.cuh"
#include "autofa/block/nonfinite.cuh"
#include "autofa/block/scheduler.cuh"
#include "autofa/block/softmax.cuh"
#include "config.cuh"
#include "merge.cuh"

namespace autofa::split_kv {

// Of the keys that a row sees, those in [first, end).
template <class Mask>
struct KeysBetween {
  const Mask& mask;
  int first, end;

  __device__ __forceinline__ bool sees(int row, int key) const {
    return key >= first && key < end && mask.sees(row, key);
  }
};

template <class Params>
__global__ void __launch_bounds__(Config<Params>::threads, Config<Params>::blocks_per_sm)
    forward(const __grid_constant__ autofa_params call) {
  using C = Config<Params>;
  using Element = typename C::Element;
  using Mask = typename C::Mask;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t q_tile = shared_address(shared);

  const BlockWork work(call, C::block_m);
  const int rows = static_cast<int>(call.seqlen_q), keys = static_cast<int>(call.seqlen_k);
  const Mask mask(call, work.batch, work.head_q);
  const KeyTiles tiles(mask, work.first_row, C::block_m, rows, C::block_n);
  const WarpPlace<C::key_warps> place;
  const int warp_row = place.row * C::rows_per_warp;
  const int row = work.first_row + warp_row + static_cast<int>(threadIdx.x) % 32 / 4;
  const int warp_key = place.column * C::keys_per_warp;

  const typename C::QLoader q_loader(matrix_at(call.q, call.q_strides, work.batch, work.head_q),
                                     call.q_strides[2]);
  typename C::Pipeline pipeline(
      q_tile + C::QTile::bytes, matrix_at(call.k, call.k_strides, work.batch, work.head_kv),
      call.k_strides[2], matrix_at(call.v, call.v_strides, work.batch, work.head_kv),
      call.v_strides[2], keys, tiles.end);

  q_loader.load(q_tile, work.first_row, rows);
  pipeline.start();
  pipeline.wait_started();
  const SoftmaxScale scale = mask.softmax_scale(call.scale);
  if (scale.negate_queries) negate_tile(q_loader, q_tile);
  __syncthreads();
  const typename C::Queries queries(q_tile, warp_row);

  OnlineSoftmax<C::m_tiles> softmax(scale.log2, C::accumulate == AUTOFA_F32 ? 8.0f : 0.0f);
  float out[C::m_tiles][C::o_tiles][4] = {};
  for (int tile = 0; tile < tiles.end; ++tile) {
    const bool masked = Mask::on_every_tile || tile >= tiles.first_masked;
    const int tile_key = tile * C::block_n, first_key = tile_key + warp_key;
    float scores[C::m_tiles][C::n_tiles][4];
    multiply_qk<Element, typename C::KPart, C::accumulate>(
        scores, queries, pipeline.keys(tile) + warp_key * C::KTile::row_bytes);
    const uint32_t values = pipeline.values(tile);
    if (masked) mask.apply(scores, row, first_key);
    softmax.fit(scores, out);
    if constexpr (Mask::hides_values) {
      if (masked) {
        const KeysBetween<Mask> own{mask, first_key, first_key + C::keys_per_warp};
        isolate_nonfinite<Element, typename C::VTile>(out, pipeline.value_loader(), values, own,
                                                      row, tile_key);
      }
    }
    accumulate_pv<Element, typename C::VPart, C::accumulate>(
        out, scores, values + warp_key * C::VTile::row_bytes,
        [&](int k) { softmax.weigh(scores, k); });
  }

  softmax.finish();
  float total[C::m_tiles][C::Merge::own_tiles][4] = {};
  const auto merged = merge<typename C::Merge, C::smem_bytes>(total, softmax, out, q_tile);
  store_columns<Element, C::head_dim, C::key_warps>(
      total, merged, matrix_at(call.out, call.out_strides, work.batch, work.head_q),
      call.out_strides[2], row, rows, place.column);
  if (call.lse != nullptr && place.column == 0) {
    const int64_t sequence = work.batch * call.heads_q + work.head_q;
    store_row_log_sums(merged, call.lse + sequence * rows, row, rows);
  }
}

template <class Params>
struct Kernel : RowBlockKernel<Config<Params>> {
  static int32_t launch(const autofa_params& call, const autofa_executor&, void* stream) {
    static KernelLauncher launcher(&forward<Params>);
    return Kernel::launch_blocks(launcher, call, stream);
  }
};

}  // namespace autofa::split_kv
