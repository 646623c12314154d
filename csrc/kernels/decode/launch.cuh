// Host side: into how many parts the keys are split, and the launches.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "autofa/abi.h"
#include "combine.cuh"
#include "work.cuh"

namespace autofa::decode {

// What a device has room for, asked for once per device.
struct Room {
  int32_t error = 0;
  int blocks = 0;         // that run at once
  bool overlaps = false;  // a kernel may be started before the one that it waits for has ended
};

// Into how many parts the keys of each of `row_blocks` blocks of rows are split. More parts fill
// the device, and even out the last wave; each part costs what it takes to fill a pipeline and to
// write a partial result, here taken for the time of four tiles. Of the numbers of parts that need
// as many waves the largest is best.
inline int choose_splits(int64_t row_blocks, int64_t keys, int block_n, int blocks_at_once) {
  constexpr int kTried = 8;
  const int64_t most = std::max<int64_t>(keys / block_n, 1);
  const int64_t first = (row_blocks + blocks_at_once - 1) / blocks_at_once;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t waves = first; waves < first + kTried; ++waves) {
    const int64_t splits = std::min(most, waves * blocks_at_once / row_blocks);
    const int64_t time = waves * ((keys + splits - 1) / splits + 4 * block_n);
    if (time < least) {
      least = time;
      best = splits;
    }
    if (splits == most) break;
  }
  return static_cast<int>(best);
}

// Safe from any number of threads, and under stream capture: nothing here waits for the device.
template <class C>
class SplitLauncher {
  using Kernel = void (*)(SplitCall);

 public:
  SplitLauncher(Kernel attend, Kernel combine) : attend_(attend), combine_(combine) {}

  // On the current device, which is `device`.
  Room room(int device) {
    const bool kept = device >= 0 && device < kDevices;
    if (kept) {
      const int known = known_[device].load(std::memory_order_acquire);
      if (known > 0) return {0, known / 2, known % 2 != 0};
    }
    Room found;
    int processors = 0, per_processor = 0, major = 0;
    const auto attempt = [&](cudaError_t error) {
      if (found.error == 0) found.error = static_cast<int32_t>(error);
    };
    attempt(
        cudaFuncSetAttribute(attend_, cudaFuncAttributeMaxDynamicSharedMemorySize, C::smem_bytes));
    attempt(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    attempt(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    attempt(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, attend_, C::threads,
                                                          C::smem_bytes));
    if (found.error == 0 && per_processor < 1) attempt(cudaErrorLaunchOutOfResources);
    if (found.error != 0) {
      cudaGetLastError();  // else a later, innocent call would find it
      return found;
    }
    found.blocks = processors * per_processor;
    found.overlaps = major >= 9;
    if (kept) known_[device].store(found.blocks * 2 + found.overlaps, std::memory_order_release);
    return found;
  }

  int32_t run(const SplitCall& arg, int64_t blocks, int64_t combine_blocks, const Room& room,
              void* stream) {
    cudaError_t error = start(attend_, arg, blocks, C::threads, C::smem_bytes, false, stream);
    if (error == cudaSuccess && arg.splits > 1) {
      error = start(combine_, arg, combine_blocks, CombineShape::threads, CombineShape::smem_bytes,
                    room.overlaps, stream);
    }
    if (error != cudaSuccess) cudaGetLastError();
    return static_cast<int32_t>(error);
  }

 private:
  static constexpr int kDevices = 64;  // whose answers are kept

  static cudaError_t start(Kernel kernel, const SplitCall& arg, int64_t blocks, int threads,
                           int smem_bytes, bool overlaps, void* stream) {
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3{static_cast<unsigned>(blocks), 1, 1};
    config.blockDim = dim3{static_cast<unsigned>(threads), 1, 1};
    config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &overlap;
    config.numAttrs = overlaps ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, arg);
  }

  Kernel attend_, combine_;
  std::atomic<int> known_[kDevices] = {};  // 2 * blocks + overlaps
};

}  // namespace autofa::decode
