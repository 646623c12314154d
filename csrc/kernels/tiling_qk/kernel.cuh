// Attention for large head dims on mma.sync: queries and keys pass through shared memory in slices
// of the head dim, so that q k^T needs the same little of it for every head dim, and values some
// keys at a time.
#pragma once

#include "autofa/abi.h"
#include "autofa/block/column_attention.cuh"
#include "autofa/block/launch.cuh"
#include "autofa/block/slice_stream.cuh"
#include "autofa/block/slices.cuh"
#include "config.cuh"

namespace autofa::tiling_qk {

template <class Params>
__global__ void __launch_bounds__(Config<Params>::threads, Config<Params>::blocks_per_sm)
    forward(const __grid_constant__ autofa_params call) {
  using C = Config<Params>;
  using Ring = SlotRing<SliceStream<C>, C::stages, C::slot_bytes>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t slots = shared_address(shared);

  const ColumnPlace<C> place(call);
  Ring ring(slots, SliceStream<C>(call, place));
  ColumnAttention<C> attention(place, call.scale, slots + Ring::bytes);
  for (int tile = 0; tile < place.tiles.end; ++tile) {
#pragma unroll 1
    for (int slice = 0; slice < C::slices; ++slice) attention.add_qk(ring.next(tile, slice));
    attention.weigh(tile);
    // Weights that stay in registers want indices that the compiler knows.
#pragma unroll(C::column_warps == 1 ? C::value_pieces : 1)
    for (int chunk = 0; chunk < C::value_pieces; ++chunk) {
      const uint32_t slot = ring.next(tile, C::slices + chunk);
      attention.template add_pv<typename C::VTile>(slot, ring.stream().value_loader(), tile,
                                                   chunk * C::piece_keys, 0);
    }
  }
  attention.store(call);
}

template <class Params>
struct Kernel : RowBlockKernel<Config<Params>> {
  static int32_t launch(const autofa_params& call, const autofa_executor&, void* stream) {
    static KernelLauncher launcher(&forward<Params>);
    return Kernel::launch_blocks(launcher, call, stream);
  }
};

}  // namespace autofa::tiling_qk
