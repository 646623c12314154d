// FlashAttention-2 on mma.sync (Dao 2023): only the query rows are split over the warps, every warp
// reads all keys and values, and the softmax weights never leave the registers. Queries, keys and
// values have buffers of their own.
#pragma once

#include "autofa/abi.h"
#include "autofa/block/launch.cuh"
#include "autofa/block/row_attention.cuh"
#include "config.cuh"

namespace autofa::split_q {

template <class Params>
__global__ void __launch_bounds__(Config<Params>::threads, Config<Params>::blocks_per_sm)
    forward(const __grid_constant__ autofa_params call) {
  using C = Config<Params>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t q_tile = shared_address(shared);

  const RowPlace<C> place(call);
  const auto q_loader = place.query_loader(call);
  auto pipeline = place.pipeline(call, q_tile + C::QTile::bytes);

  q_loader.load(q_tile, place.work.first_row, place.rows);
  pipeline.start();
  pipeline.wait_started();
  const SoftmaxScale scale = place.mask.softmax_scale(call.scale);
  if (scale.negate_queries) negate_tile(q_loader, q_tile);
  __syncthreads();
  const typename C::Queries queries(q_tile, place.warp_row);

  RowAttention<C> attention(place, scale.log2);
  for (int tile = 0; tile < place.tiles.end; ++tile) attention.absorb(queries, pipeline, tile);
  attention.store(call, q_tile);
}

template <class Params>
struct Kernel : RowBlockKernel<Config<Params>> {
  static int32_t launch(const autofa_params& call, const autofa_executor&, void* stream) {
    static KernelLauncher launcher(&forward<Params>);
    return Kernel::launch_blocks(launcher, call, stream);
  }
};

}  // namespace autofa::split_q
