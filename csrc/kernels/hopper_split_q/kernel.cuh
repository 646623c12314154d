// FlashAttention on Hopper's wgmma and TMA, warp-specialised (Shah et al. 2024): a producer warp
// keeps a ring of key and value chunks filled, up to three consumer warpgroups own 64 query rows
// each. Thread blocks are persistent. A chunk is the unit of the ring, not a tile: many small
// buffers hide more latency in the same shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include "autofa/abi.h"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/arch/warpgroup.cuh"
#include "autofa/block/mapped_launch.cuh"
#include "config.cuh"
#include "consumer.cuh"
#include "producer.cuh"

namespace autofa::hopper_split_q {

template <class Params>
__global__ void __launch_bounds__(Config<Params>::threads, 1)
    forward(const __grid_constant__ MappedCall mapped) {
  using C = Config<Params>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Memory<C> memory{shared_address(shared)};
  if (threadIdx.x == 0) memory.init_barriers();
  __syncthreads();

  const int group = warpgroup_index();
  if (group == C::consumers) {
    if constexpr (C::consumers > 1) release_registers<C::producer_registers>();
    if (threadIdx.x == C::consumers * kWarpgroupThreads) Producer<C>(mapped, memory).run();
  } else {
    if constexpr (C::consumers > 1) take_registers<C::consumer_registers>();
    Consumer<C>(mapped, memory, group).run();
  }
}

template <class Params>
struct Kernel : MappedLaunch<Config<Params>> {
  using C = Config<Params>;

  // A counter of tiles that are taken, where they differ in length and a block gets several.
  static int64_t workspace_bytes(const autofa_params& call) {
    int blocks = 0;
    if (!C::counted || (cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount,
                                               call.device_index) == cudaSuccess &&
                        C::Queue::count(call) <= blocks)) {
      return 0;
    }
    return sizeof(unsigned);
  }

  static int32_t launch(const autofa_params& call, const autofa_executor&, void* stream) {
    static PersistentLauncher<MappedCall> launcher(&forward<Params>);
    if (call.workspace != nullptr) {
      const cudaError_t error =
          cudaMemsetAsync(call.workspace, 0, sizeof(unsigned), static_cast<cudaStream_t>(stream));
      if (error != cudaSuccess) return static_cast<int32_t>(error);
    }
    return Kernel::launch_tiles(launcher, call, stream);
  }
};

}  // namespace autofa::hopper_split_q
