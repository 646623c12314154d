// The few host functions that a launch needs; kernels run at once, block by block.
#pragma once

#include "autofa/abi.h"
#include "emulator.h"

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1;
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 8;

inline size_t granted_shared_memory = 48 * 1024;

inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaFuncSetAttribute(const void*, int, int bytes) {
  granted_shared_memory = static_cast<size_t>(bytes);
  return cudaSuccess;
}

// Every kernel of this project takes one autofa_params by value.
inline cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                                    size_t shared_bytes, cudaStream_t) {
  static void (*entry)(autofa_params);
  entry = reinterpret_cast<void (*)(autofa_params)>(const_cast<void*>(kernel));
  if (shared_bytes > granted_shared_memory || grid.x == 0) return cudaErrorInvalidValue;
  emulator::argument = arguments[0];
  emulator::body = [](const void* call) { entry(*static_cast<const autofa_params*>(call)); };
  for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
    emulator::run_block(block.x, blockIdx.x);
  }
  return cudaSuccess;
}
