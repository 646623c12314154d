// FlashAttention on Hopper's wgmma and TMA for head dims beyond 512: the three or four thread
// blocks of a cluster own 128 query rows together, and each a slice of the head dim, of which it
// multiplies out its share of the scores and its columns of the output. The shares of 16 or 32
// keys' scores meet in one block, and their weights go from there to all.
//
// What the blocks send each other, more than the products, is what a step takes: on an H200, of
// four blocks, as long at a head dim of 576 as at 1024. Three send 16 KB for 64 keys of a
// warpgroup's rows where four send 18.
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
    static PersistentLauncher<MappedCall> launcher(&forward<Params>, Config<Params>::ranks);
    return Kernel::launch_tiles(launcher, call, stream);
  }
};

}  // namespace autofa::hopper_sliced
