// FlashAttention on Hopper's wgmma and TMA for head dims that one SM's registers cannot hold the
// output of: the two thread blocks of a cluster own 128 query rows together. Each multiplies out
// the scores of half of the keys, over the whole head dim, and the output of half of the columns,
// over all keys; so the weights, which are small, go from either to the other.
//
// As in other warp-specialised kernels a producer warp keeps a ring of chunks filled, here in the
// order of two consumer warpgroups of 64 rows. Blocks are persistent.
#pragma once

#include "autofa/abi.h"
#include "autofa/arch/cluster.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/arch/warpgroup.cuh"
#include "autofa/block/mapped_launch.cuh"
#include "config.cuh"
#include "consumer.cuh"
#include "producer.cuh"

namespace autofa::hopper_sliced {

template <class Params>
__global__ void __launch_bounds__(Config<Params>::threads, 1)
    forward(const __grid_constant__ MappedCall mapped) {
  using C = Config<Params>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Memory<C> memory{shared_address(shared)};
  const int rank = __shfl_sync(~0u, static_cast<int>(cluster_rank()), 0);
  if (threadIdx.x == 0) memory.init_barriers();
  __syncthreads();
  cluster_sync();

  const int group = warpgroup_index();
  if (group == kConsumers) {
    release_registers<C::producer_registers>();
    if (threadIdx.x == kConsumers * kWarpgroupThreads) Producer<C>(mapped, memory, rank).run();
    __syncwarp();
  } else {
    take_registers<C::consumer_registers>();
    Consumer<C>(mapped, memory, group, rank).run();
  }
  cluster_sync();
}

template <class Params>
struct Kernel : MappedLaunch<Config<Params>, Config<Params>> {
  static int32_t launch(const autofa_params& call, const autofa_executor&, void* stream) {
    static PersistentLauncher<MappedCall> launcher(&forward<Params>, kRanks);
    return Kernel::launch_tiles(launcher, call, stream);
  }
};

}  // namespace autofa::hopper_sliced
