// FlashAttention-2 on mma.sync (Dao 2023): only the query rows are split over the warps, every warp
// reads all keys and values, and the softmax weights never leave the registers.
#pragma once

#include "autofa/abi.h"
#include "autofa/block/epilogue.cuh"
#include "autofa/block/fragments.cuh"
#include "autofa/block/launch.cuh"
#include "autofa/block/mask.cuh"
#include "autofa/block/nonfinite.cuh"
#include "autofa/block/scheduler.cuh"
#include "autofa/block/softmax.cuh"
#include "config.cuh"

namespace autofa::split_q {

template <class Params>
__global__ void __launch_bounds__(Config<Params>::threads, Config<Params>::blocks_per_sm)
    forward(const __grid_constant__ autofa_params call) {
  using C = Config<Params>;
  using Element = typename C::Element;
  using Mask = KeyMask<C::causal, C::mask>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t q_tile = shared_address(shared);

  const BlockWork work(call, C::block_m);
  const int rows = static_cast<int>(call.seqlen_q), keys = static_cast<int>(call.seqlen_k);
  const Mask mask(call, work.batch, work.head_q);
  const KeyTiles tiles(mask, work.first_row, C::block_m, rows, C::block_n);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * C::rows_per_warp;
  const int row = work.first_row + warp_row + static_cast<int>(threadIdx.x) % 32 / 4;

  const TileLoader<typename C::QTile, C::threads, C::head_dim> q_loader(
      matrix_at(call.q, call.q_strides, work.batch, work.head_q), call.q_strides[2]);
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
  const Queries<typename C::QTile, C::m_tiles, C::held_squares> queries(q_tile, warp_row);

  OnlineSoftmax<C::m_tiles> softmax(scale.log2, C::accumulate == AUTOFA_F32 ? 8.0f : 0.0f);
  float out[C::m_tiles][C::o_tiles][4] = {};
  for (int tile = 0; tile < tiles.end; ++tile) {
    const bool masked = Mask::on_every_tile || tile >= tiles.first_masked;
    const int first_key = tile * C::block_n;
    float scores[C::m_tiles][C::n_tiles][4];
    multiply_qk<Element, typename C::KTile, C::accumulate>(scores, queries, pipeline.keys(tile));
    const uint32_t values = pipeline.values(tile);
    if (masked) mask.apply(scores, row, first_key);
    softmax.fit(scores, out);
    if constexpr (Mask::hides_values) {
      if (masked) {
        isolate_nonfinite<Element, typename C::VTile>(out, pipeline.value_loader(), values, mask,
                                                      row, first_key);
      }
    }
    accumulate_pv<Element, typename C::VTile, C::accumulate>(
        out, scores, values, [&](int k) { softmax.weigh(scores, k); });
  }

  softmax.finish();
  store_output<Element, typename C::QTile, C::head_dim>(
      out, softmax, q_tile, warp_row,
      matrix_at(call.out, call.out_strides, work.batch, work.head_q), call.out_strides[2],
      work.first_row, rows);
  if (call.lse != nullptr) {
    const int64_t sequence = work.batch * call.heads_q + work.head_q;
    store_log_sums(softmax, call.lse + sequence * rows, warp_row, work.first_row, rows);
  }
}

template <class Params>
struct Kernel : RowBlockKernel<Config<Params>> {
  static int32_t launch(const autofa_params& call, const autofa_executor&, void* stream) {
    static KernelLauncher launcher(&forward<Params>);
    return Kernel::launch_blocks(launcher, call, stream);
  }
};

}  // namespace autofa::split_q
