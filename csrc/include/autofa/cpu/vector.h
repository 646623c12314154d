// One SIMD register of floats as an ordinary value, for the instruction set a library is compiled
// for: 16 lanes with AVX-512, 8 with AVX2.
#pragma once

#include <immintrin.h>
#include <stdint.h>

// Expands a loop over a fixed-size array of registers; without it g++ keeps the array in memory.
#define AUTOFA_UNROLL _Pragma("GCC unroll 32")

namespace autofa::cpu {

#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int kVectorBytes = kLanes * 4;

typedef float Floats __attribute__((vector_size(kVectorBytes), may_alias));
typedef float UnalignedFloats __attribute__((vector_size(kVectorBytes), may_alias, aligned(4)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes), may_alias));

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
inline void store(float* to, Floats value) { *reinterpret_cast<Floats*>(to) = value; }
inline Floats load_unaligned(const float* from) {
  return *reinterpret_cast<const UnalignedFloats*>(from);
}
inline void store_unaligned(float* to, Floats value) {
  *reinterpret_cast<UnalignedFloats*>(to) = value;
}

inline Floats broadcast(float value) { return value - Floats{}; }

inline Ints lane_numbers() {
  alignas(64) static constexpr int32_t numbers[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                      8, 9, 10, 11, 12, 13, 14, 15};
  return *reinterpret_cast<const Ints*>(numbers);
}

// Where an operand is NaN the result is `b`.
inline Floats max(Floats a, Floats b) {
#ifdef __AVX512F__
  return reinterpret_cast<Floats>(
      _mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
  return reinterpret_cast<Floats>(
      _mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#endif
}

// 2^t for t <= 0, relative error below 2.2e-7; NaN stays NaN whatever its payload.
// The result is exactly 0 below t = -64: a weight of 2^-64 is invisible in f32, and denormal
// weights made logits of a few hundred a hundred times slower. The polynomials are minimax fits of
// 2^f of relative error 7.5e-8; with AVX-512, VREDUCEPS gives t - floor(t) and VSCALEFPS multiplies
// by 2^floor(t), so f lies in [0, 1); with AVX2, f lies in [-1/2, 1/2].
inline Floats exp2_nonpositive(Floats t) {
#ifdef __AVX512F__
  const __m512 x = reinterpret_cast<__m512>(t);
  const Floats f = reinterpret_cast<Floats>(_mm512_reduce_ps(x, 0x09));
  Floats p = f * 0.0018775766948238015f + 0.008989340625703335f;
  p = p * f + 0.05582631751894951f;
  p = p * f + 0.24015361070632935f;
  p = p * f + 0.6931530833244324f;
  p = p * f + 0.9999999403953552f;
  const __mmask16 keep = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-64.f), _CMP_NLT_UQ);
  return reinterpret_cast<Floats>(_mm512_maskz_scalef_ps(keep, reinterpret_cast<__m512>(p), x));
#else
  // Adding 1.5 * 2^23 + 127 rounds to an integer and leaves the exponent field of 2^n in the low
  // byte. The power is multiplied in: added to p's bits it would turn some NaNs into numbers.
  const float magic = 12583039.f;
  const Floats shifted = t + magic;
  const Floats f = t - (shifted - magic);
  Floats p = f * 0.0013276472454890609f + 0.009675541892647743f;
  p = p * f + 0.05550713092088699f;
  p = p * f + 0.24022120237350464f;
  p = p * f + 0.6931469440460205f;
  p = p * f + 1.0000001192092896f;
  p *= reinterpret_cast<Floats>(reinterpret_cast<Ints>(shifted) << 23);
  return t < -64.f ? Floats{} : p;
#endif
}

}  // namespace autofa::cpu
