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
  int processors = 0, blocks_each = 0;  // blocks that an SM runs at once
  bool overlaps = false;  // a kernel may be started before the one that it waits for has ended
};

// How many of the blocks that an SM runs at once make it read as fast as it can. On an H200 two
// were not faster than one where it had 102 KiB of buffers or more (head dims 64, 128 and 512), but
// where it had 72 or 76 (256 and 576).
inline int enough_blocks(int blocks_each, int buffer_bytes) {
  constexpr int kOnTheWay = 96 * 1024;
  return std::min(blocks_each, (kOnTheWay + buffer_bytes - 1) / buffer_bytes);
}

// Into how many parts the keys of each of `row_blocks` blocks of rows are split, on a device that
// runs `at_once` blocks and is as fast with `enough`. Fewer leave it idle; with more a wave takes
// longer by as much as there is to read. Each part costs what it takes to fill a pipeline and to
// write a partial result, here taken for the time of four tiles. So the parts are few that give
// every SM enough blocks, or a multiple of that where it evens out the last wave.
//
// On an H200 half as many as fill all that runs at once took 0.90 to 1.00 of the time on seven
// shapes of one query at head dims 64 to 512, and 1.02 where a sequence is 512 keys; twice as many
// 1.01 to 1.56.
inline int choose_splits(int64_t row_blocks, int64_t keys, int block_n, int64_t at_once,
                         int64_t enough) {
  constexpr int kTried = 8;
  const int64_t most = std::max<int64_t>(keys / block_n, 1);
  const int64_t first = (row_blocks + enough - 1) / enough;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t multiple = first; multiple < first + kTried; ++multiple) {
    const int64_t splits = std::min(most, multiple * enough / row_blocks);
    const int64_t blocks = row_blocks * splits, last = blocks % at_once;
    const int64_t busy = blocks - last + (last > 0 ? std::max(last, enough) : 0);
    const int64_t time = busy * ((keys + splits - 1) / splits + 4 * block_n);
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
      if (known > 0) return {0, known / 2 / kMostEach, known / 2 % kMostEach, known % 2 != 0};
    }
    Room found;
    int major = 0;
    const auto attempt = [&](cudaError_t error) {
      if (found.error == 0) found.error = static_cast<int32_t>(error);
    };
    attempt(
        cudaFuncSetAttribute(attend_, cudaFuncAttributeMaxDynamicSharedMemorySize, C::smem_bytes));
    attempt(cudaDeviceGetAttribute(&found.processors, cudaDevAttrMultiProcessorCount, device));
    attempt(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    attempt(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found.blocks_each, attend_, C::threads,
                                                          C::smem_bytes));
    // Loads it: a first launch may not be captured, and the first calls may not be split.
    cudaFuncAttributes loaded;
    attempt(cudaFuncGetAttributes(&loaded, combine_));
    if (found.error == 0 && found.blocks_each < 1) attempt(cudaErrorLaunchOutOfResources);
    if (found.error != 0) {
      cudaGetLastError();  // else a later, innocent call would find it
      return found;
    }
    found.overlaps = major >= 9;
    if (kept) {
      const int blocks = found.processors * kMostEach + found.blocks_each;
      known_[device].store(blocks * 2 + found.overlaps, std::memory_order_release);
    }
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
  static constexpr int kDevices = 64;   // whose answers are kept
  static constexpr int kMostEach = 64;  // more blocks than any SM runs at once

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
  std::atomic<int> known_[kDevices] = {};  // a room, as one number
};

}  // namespace autofa::decode
