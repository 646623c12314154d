// The two 16-bit element types. Not through cuda_fp16.h: it costs more to compile than a kernel.
#pragma once

#include <cstdint>

#include "autofa/abi.h"

namespace autofa {

struct F16 {
  static constexpr int dtype = AUTOFA_F16;
  static constexpr uint16_t exponent = 0x7c00;  // all ones in infinities and NaNs only

  // Two floats rounded to nearest, `low` in the lower half.
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  static __device__ __forceinline__ float unpack(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;\n" : "=f"(value) : "h"(bits));
    return value;
  }
};

struct Bf16 {
  static constexpr int dtype = AUTOFA_BF16;
  static constexpr uint16_t exponent = 0x7f80;

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  static __device__ __forceinline__ float unpack(uint16_t bits) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  }
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

// 2^x to about 2 ulp; 2^-inf is 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(power) : "f"(x));
  return power;
}

}  // namespace autofa
