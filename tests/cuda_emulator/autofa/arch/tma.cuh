// Stands in for the header of the same name. A copy spoils its target when it is issued: whoever
// still reads there, or does not wait, gets NaNs.
#pragma once

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
inline void for_each_of_box(const EmulatedTensorMap& map, const int (&at)[4], Function f) {
  uint32_t offset = 0;
  for (int w = at[3]; w < at[3] + map.box[3]; ++w) {
    for (int z = at[2]; z < at[2] + map.box[2]; ++z) {
      for (int y = at[1]; y < at[1] + map.box[1]; ++y) {
        for (int x = at[0]; x < at[0] + map.box[0]; ++x, offset += 2) {
          const int place[4] = {x, y, z, w};
          const char* element = map.base;
          for (int i = 0; i < 4 && element != nullptr; ++i) {
            const bool inside = place[i] >= 0 && static_cast<uint32_t>(place[i]) < map.sizes[i];
            element = inside ? element + static_cast<uint64_t>(place[i]) * map.strides[i] : nullptr;
          }
          f(offset, element);
        }
      }
    }
  }
}

// The 16-byte chunks of 128 bytes change places with the lowest bits of the 128 bytes' number.
inline uint32_t swizzled_128(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void tma_load(uint32_t target, const TensorMap& map, uint32_t barrier, int x, int y, int z,
                     int w) {
  const EmulatedTensorMap made = decoded(map);
  const int at[4] = {x, y, z, w};
  const int bytes = made.box[0] * made.box[1] * made.box[2] * made.box[3] * 2;
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

}  // namespace autofa
