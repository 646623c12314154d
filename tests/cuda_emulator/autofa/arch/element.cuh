// Stands in for the header of the same name: the conversions in plain C++.
#pragma once

#include "autofa/abi.h"
#include "emulator.h"

namespace autofa {

struct F16 {
  static constexpr int dtype = AUTOFA_F16;
  static constexpr uint16_t exponent = 0x7c00;

  static uint32_t pack(float low, float high) { return round(low) | round(high) << 16; }
  static uint32_t round(float value) {
    const _Float16 half = static_cast<_Float16>(value);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
  }
  static float unpack(uint16_t bits) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return static_cast<float>(half);
  }
};

struct Bf16 {
  static constexpr int dtype = AUTOFA_BF16;
  static constexpr uint16_t exponent = 0x7f80;

  static uint32_t pack(float low, float high) { return round(low) | round(high) << 16; }
  static uint32_t round(float value) {
    if (std::isnan(value)) return 0x7fff;
    const uint32_t bits = __float_as_uint(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static float unpack(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
};

template <int Dtype>
struct ElementOf;
template <>
struct ElementOf<AUTOFA_F16> {
  using type = F16;
};
template <>
struct ElementOf<AUTOFA_BF16> {
  using type = Bf16;
};

inline float exp2_fast(float x) { return exp2f(x); }

}  // namespace autofa
