// The few host functions that a launch needs; kernels run at once, cluster by cluster.
#pragma once

#include "autofa/abi.h"
#include "emulator.h"

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1,
                      cudaErrorLaunchOutOfResources = 701, cudaErrorLaunchFailure = 719;
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 8;
constexpr int cudaFuncAttributeNonPortableClusterSizeAllowed = 16;
constexpr int cudaDevAttrMultiProcessorCount = 16;
constexpr int cudaDevAttrComputeCapabilityMajor = 75;
// Few SMs, so that a persistent block gets several tiles.
constexpr int kEmulatedProcessors = 3;

inline size_t granted_shared_memory = 48 * 1024;

inline cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
  std::memset(target, value, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }

struct cudaFuncAttributes {};
template <class Function>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Function) {
  return cudaSuccess;
}

template <class Function>
inline cudaError_t cudaFuncSetAttribute(Function, int attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    granted_shared_memory = static_cast<size_t>(value);
  }
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int) {
  if (attribute == cudaDevAttrMultiProcessorCount) {
    *value = kEmulatedProcessors;
  } else if (attribute == cudaDevAttrComputeCapabilityMajor) {
    *value = 9;
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

inline cudaError_t emulate_launch(dim3 grid, dim3 threads, unsigned ranks, size_t shared_bytes,
                                  std::function<void()> body) {
  if (shared_bytes > granted_shared_memory || grid.x == 0 || grid.x % ranks != 0) {
    return cudaErrorInvalidValue;
  }
  emulator::body = std::move(body);
  gridDim = grid;
  for (unsigned first = 0; first < grid.x; first += ranks) {
    if (!emulator::run_cluster(first, ranks, threads.x)) return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}

// Every kernel that is launched like this takes one autofa_params by value.
inline cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                                    size_t shared_bytes, cudaStream_t) {
  const auto entry = reinterpret_cast<void (*)(autofa_params)>(const_cast<void*>(kernel));
  const auto* call = static_cast<const autofa_params*>(arguments[0]);
  return emulate_launch(grid, block, 1, shared_bytes, [=] { entry(*call); });
}

enum {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
struct cudaLaunchAttribute {
  int id;
  struct {
    dim3 clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

inline unsigned emulated_ranks(const cudaLaunchConfig_t* config) {
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      return config->attrs[i].val.clusterDim.x;
    }
  }
  return 1;
}

template <class Argument>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Argument),
                                      const Argument& argument) {
  return emulate_launch(config->gridDim, config->blockDim, emulated_ranks(config),
                        config->dynamicSmemBytes, [&] { kernel(argument); });
}

template <class Function>
inline cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Function,
                                                  const cudaLaunchConfig_t* config) {
  // One at least, however wide.
  *clusters = std::max(1, kEmulatedProcessors / static_cast<int>(emulated_ranks(config)));
  return *clusters > 0 ? cudaSuccess : cudaErrorInvalidValue;
}

template <class Function>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function, int,
                                                                 size_t) {
  *blocks = 1;
  return cudaSuccess;
}

#include "tensor_map_encoder.h"
