// Query rows split over the warps, and one memory for everything: the queries pass through it to
// the registers, then keys and values take turns in it. The least shared memory of all families.
#pragma once

#include "autofa/abi.h"
#include "autofa/block/launch.cuh"
#include "autofa/block/row_attention.cuh"
#include "config.cuh"

namespace autofa::share_qkv {

template <class Params>
__global__ void __launch_bounds__(Config<Params>::threads, Config<Params>::blocks_per_sm)
    forward(const __grid_constant__ autofa_params call) {
  using C = Config<Params>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t memory = shared_address(shared);  // the queries', then the keys' and values'

  const RowPlace<C> place(call);
  const auto q_loader = place.query_loader(call);
  auto pipeline = place.pipeline(call, memory);

  q_loader.load(memory, place.work.first_row, place.rows);
  cp_async_commit();
  cp_async_wait<0>();
  const SoftmaxScale scale = place.mask.softmax_scale(call.scale);
  if (scale.negate_queries) negate_tile(q_loader, memory);
  __syncthreads();
  const typename C::Queries queries(memory, place.warp_row);
  __syncthreads();  // all warps have read their queries

  pipeline.start();
  RowAttention<C> attention(place, scale.log2);
  for (int tile = 0; tile < place.tiles.end; ++tile) attention.absorb(queries, pipeline, tile);
  pipeline.drain();
  attention.store(call, memory);
}

template <class Params>
struct Kernel : RowBlockKernel<Config<Params>> {
  static int32_t launch(const autofa_params& call, const autofa_executor&, void* stream) {
    static KernelLauncher launcher(&forward<Params>);
    return Kernel::launch_blocks(launcher, call, stream);
  }
};

}  // namespace autofa::share_qkv
