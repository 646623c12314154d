// Host side of a persistent kernel: as many thread blocks as the device runs at once.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "autofa/abi.h"

namespace autofa {

// Launches one kernel of a parameter struct. Safe from any number of threads, and under stream
// capture: nothing here waits for the device.
template <class Arguments>
class PersistentLauncher {
 public:
  // Of thread blocks by themselves, or of clusters of `ranks` blocks.
  explicit PersistentLauncher(void (*kernel)(Arguments), int ranks = 1)
      : kernel_(kernel), ranks_(ranks) {}

  // On the current device, which is `device`, with one block or cluster for each of `tiles` but no
  // more than run at once: a block takes a whole SM. Returns what autofa_launch returns.
  int32_t run(const Arguments& arguments, int device, int64_t tiles, int threads, int smem_bytes,
              void* stream) {
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(ranks_);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3{static_cast<unsigned>(ranks_), 1, 1};
    config.blockDim = dim3{static_cast<unsigned>(threads), 1, 1};
    config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &cluster;
    config.numAttrs = ranks_ > 1 ? 1 : 0;
    int places = 0;
    cudaError_t error = prepare(device, config, places);
    if (error == cudaSuccess) {
      config.gridDim.x *= static_cast<unsigned>(std::min<int64_t>(tiles, places));
      error = cudaLaunchKernelEx(&config, kernel_, arguments);
    }
    if (error != cudaSuccess) cudaGetLastError();  // else a later, innocent call would find it
    return static_cast<int32_t>(error);
  }

 private:
  static constexpr int kDevices = 64;  // whose answers are kept

  // Asks for the shared memory, and for the number of blocks or clusters that run at once, once
  // per device.
  cudaError_t prepare(int device, const cudaLaunchConfig_t& config, int& places) {
    const bool kept = device >= 0 && device < kDevices;
    if (kept) places = places_[device].load(std::memory_order_acquire);
    if (places > 0) return cudaSuccess;
    cudaError_t error = cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(config.dynamicSmemBytes));
    if (error == cudaSuccess && ranks_ == 1) {
      error = cudaDeviceGetAttribute(&places, cudaDevAttrMultiProcessorCount, device);
    } else if (error == cudaSuccess) {
      // SMs that no neighbour is left for run none: fewer than SMs / ranks may fit.
      error = cudaOccupancyMaxActiveClusters(&places, kernel_, &config);
      if (error == cudaSuccess && places < 1) error = cudaErrorLaunchOutOfResources;
    }
    if (error == cudaSuccess && kept) places_[device].store(places, std::memory_order_release);
    return error;
  }

  void (*kernel_)(Arguments);
  const int ranks_;
  std::atomic<int> places_[kDevices] = {};
};

}  // namespace autofa
