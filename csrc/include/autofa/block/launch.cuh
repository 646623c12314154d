// Host side of a launch: what 16-byte accesses need of the tensors, and large shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "autofa/abi.h"

namespace autofa {

// Whether every row of a tensor of 16-bit elements starts on a 16-byte boundary. The strides of
// dimensions of size 1 do not matter.
inline bool rows_aligned(const void* tensor, const int64_t (&strides)[3], int64_t batch,
                         int64_t heads, int64_t rows) {
  const int64_t sizes[3] = {batch, heads, rows};
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] > 1 && strides[i] % 8 != 0) return false;
  }
  return reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
}

// Lets `kernel` use `bytes` of dynamic shared memory on the current device: once per device, from
// any number of threads (repeating it is harmless). Not a stream operation, so legal under capture.
class SharedMemoryOptIn {
 public:
  cudaError_t request(const void* kernel, int bytes, int device) {
    if (bytes <= 48 * 1024) return cudaSuccess;
    const bool known = device >= 0 && device < 64;
    const uint64_t bit = known ? uint64_t{1} << device : 0;
    if (granted_.load(std::memory_order_acquire) & bit) return cudaSuccess;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) granted_.fetch_or(bit, std::memory_order_release);
    return error;
  }

 private:
  std::atomic<uint64_t> granted_{0};
};

}  // namespace autofa
