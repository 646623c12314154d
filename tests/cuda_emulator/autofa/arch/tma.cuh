// Stands in for the header of the same name. A copy spoils its target when it is issued: whoever
// still reads there, or does not wait, gets NaNs.
#pragma once

#include <array>

#include "autofa/arch/mbarrier.cuh"
#include "cuda_runtime_api.h"

namespace autofa {

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

inline EmulatedTensorMap decoded(const TensorMap& map) {
  EmulatedTensorMap made;
  std::memcpy(&made, &map, sizeof(made));
  if (made.magic != kTensorMapMagic) emulator::fail("a tensor map that was not encoded");
  return made;
}

inline void tma_prefetch(const TensorMap& map) { decoded(map); }

// Calls f(offset in the box, in bytes; element of the tensor, null outside of it).
template <class Function>
inline void for_each_of_box(const EmulatedTensorMap& map, const std::array<int, 5>& at,
                            Function f) {
  const int count = map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.box[4];
  for (int i = 0; i < count; ++i) {
    const char* element = map.base;
    int left = i;
    for (int d = 0; d < 5; left /= map.box[d++]) {
      const int place = at[d] + left % map.box[d];
      const bool inside = place >= 0 && static_cast<uint32_t>(place) < map.sizes[d];
      if (!inside || element == nullptr) {
        element = nullptr;
      } else {
        element += static_cast<uint64_t>(place) * map.strides[d];
      }
    }
    f(static_cast<uint32_t>(i) * 2, element);
  }
}

// The 16-byte chunks of 128 bytes change places with the lowest bits of the 128 bytes' number.
inline uint32_t swizzled_128(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void tma_load_at(uint32_t target, const TensorMap& map, uint32_t barrier, int rank,
                        const std::array<int, 5>& at) {
  const EmulatedTensorMap made = decoded(map);
  if (made.rank != rank) emulator::fail("a copy of other dimensions than its map");
  const int bytes = made.box[0] * made.box[1] * made.box[2] * made.box[3] * made.box[4] * 2;
  if ((target & 0xffffff) % (made.swizzled ? 1024 : 128) != 0) {
    emulator::fail("a TMA target that is not aligned");
  }
  if (target >> 24 != barrier >> 24) emulator::fail("TMA counts at another block's mbarrier");
  if ((target & 0xffffff) + bytes > emulator::shared_bytes) {
    emulator::fail("a TMA target outside shared memory");
  }
  const auto& stored = emulator::cluster[target >> 24].stored;
  for (uint32_t chunk = (target & 0xffffff) / 16; chunk < ((target & 0xffffff) + bytes) / 16;
       ++chunk) {
    if (stored[chunk] != 0) emulator::fail("TMA over a plain store without fence_proxy_async");
  }
  std::memset(cluster_pointer(target, 128), 0xff, bytes);
  fenced_mbarrier_at(barrier).landing.push_back([=] {
    for_each_of_box(made, at, [&](uint32_t offset, const char* element) {
      const uint32_t plain = target + offset;
      unsigned char* place = cluster_pointer(made.swizzled ? swizzled_128(plain) : plain, 2);
      if (element == nullptr) {
        std::memset(place, 0, 2);
      } else {
        std::memcpy(place, element, 2);
      }
    });
    return bytes;
  });
}

inline void tma_load(uint32_t target, const TensorMap& map, uint32_t barrier, int x, int y, int z,
                     int w) {
  tma_load_at(target, map, barrier, 4, {x, y, z, w, 0});
}
inline void tma_load(uint32_t target, const TensorMap& map, uint32_t barrier, int x, int y, int z,
                     int v, int w) {
  tma_load_at(target, map, barrier, 5, {x, y, z, v, w});
}

}  // namespace autofa
