// The driver's encoder of tensor maps, which a launch asks for by name: it checks what the driver's
// manual demands and keeps the arguments for tma_load().
#pragma once

#include <cstdint>
#include <cstring>

using cudaDriverEntryPointQueryResult = int;
constexpr int cudaEnableDefault = 0, cudaDriverEntryPointSuccess = 0;

struct EmulatedTensorMap {
  uint64_t magic;
  const char* base;
  uint64_t strides[5];  // in bytes; of the innermost dimension 2
  uint32_t sizes[5];
  uint16_t box[5];
  uint16_t rank;
  bool swizzled;
};
static_assert(sizeof(EmulatedTensorMap) <= 128);
constexpr uint64_t kTensorMapMagic = 0x70616d20726f736e;

// By the values of the enums in cuda.h.
inline int emulated_encode(void* map, int type, uint32_t rank, void* base, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                           int interleave, int swizzle, int promotion, int fill) {
  constexpr int f16 = 6, bf16 = 9, swizzle_none = 0, swizzle_128 = 3;
  constexpr int invalid = 1;
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0 || (type != f16 && type != bf16) ||
      (rank != 4 && rank != 5) || base == nullptr || reinterpret_cast<uintptr_t>(base) % 16 != 0 ||
      interleave != 0 || (swizzle != swizzle_none && swizzle != swizzle_128) || promotion < 0 ||
      promotion > 3 || fill != 0) {
    return invalid;
  }
  EmulatedTensorMap made = {};
  made.magic = kTensorMapMagic;
  made.base = static_cast<const char*>(base);
  made.swizzled = swizzle == swizzle_128;
  made.rank = static_cast<uint16_t>(rank);
  made.sizes[4] = made.box[4] = 1;
  for (uint32_t i = 0; i < rank; ++i) {
    const uint64_t stride = i == 0 ? 2 : strides[i - 1];
    if (i > 0 && (stride % 16 != 0 || stride >= uint64_t{1} << 40)) return invalid;
    if (sizes[i] == 0 || sizes[i] >= uint64_t{1} << 32) return invalid;
    if (box[i] == 0 || box[i] > 256 || steps[i] != 1) return invalid;
    made.strides[i] = stride;
    made.sizes[i] = static_cast<uint32_t>(sizes[i]);
    made.box[i] = static_cast<uint16_t>(box[i]);
  }
  if (box[0] * 2 % 16 != 0 || (made.swizzled && box[0] * 2 > 128)) return invalid;
  std::memset(map, 0, 128);
  std::memcpy(map, &made, sizeof(made));
  return 0;
}

inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&emulated_encode) : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : 1;
  return cudaSuccess;
}
