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
  explicit PersistentLauncher(void (*kernel)(Arguments)) : kernel_(kernel) {}

  // On the current device, which is `device`, with one block for each of `tiles` but no more than
  // there are SMs: a block takes a whole SM. Returns what autofa_launch returns.
  int32_t run(const Arguments& arguments, int device, int64_t tiles, int threads, int smem_bytes,
              void* stream) {
    int processors = 0;
    cudaError_t error = prepare(device, smem_bytes, processors);
    if (error == cudaSuccess) {
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3{static_cast<unsigned>(std::min<int64_t>(tiles, processors)), 1, 1};
      config.blockDim = dim3{static_cast<unsigned>(threads), 1, 1};
      config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
      config.stream = static_cast<cudaStream_t>(stream);
      error = cudaLaunchKernelEx(&config, kernel_, arguments);
    }
    if (error != cudaSuccess) cudaGetLastError();  // else a later, innocent call would find it
    return static_cast<int32_t>(error);
  }

 private:
  static constexpr int kDevices = 64;  // whose answers are kept

  // Asks for the shared memory and for the number of SMs, once per device.
  cudaError_t prepare(int device, int smem_bytes, int& processors) {
    const bool kept = device >= 0 && device < kDevices;
    if (kept) processors = processors_[device].load(std::memory_order_acquire);
    if (processors > 0) return cudaSuccess;
    cudaError_t error =
        cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    }
    if (error == cudaSuccess && kept) {
      processors_[device].store(processors, std::memory_order_release);
    }
    return error;
  }

  void (*kernel_)(Arguments);
  std::atomic<int> processors_[kDevices] = {};
};

}  // namespace autofa
