// The element types of tensors on CPU: how a register of them is loaded as, and stored from, f32.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "autofa/abi.h"
#include "autofa/cpu/vector.h"

namespace autofa::cpu {

#ifdef __AVX512F__
typedef __m256i HalfWords;  // kLanes elements of 16 bits
#else
typedef __m128i HalfWords;
#endif

// Element<Dtype>::Type is the storage type; load and store move kLanes unaligned elements.
// Stores round to nearest, ties to even; NaN stays NaN.
template <int Dtype>
struct Element;

template <>
struct Element<AUTOFA_F32> {
  using Type = float;
  static Floats load(const Type* from) { return load_unaligned(from); }
  static void store(Type* to, Floats value) { store_unaligned(to, value); }
};

template <>
struct Element<AUTOFA_BF16> {
  using Type = uint16_t;

  static Floats load(const Type* from) {
    HalfWords words;
    memcpy(&words, from, sizeof words);
#ifdef __AVX512F__
    return reinterpret_cast<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
#else
    return reinterpret_cast<Floats>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
#endif
  }

  static void store(Type* to, Floats value) {
    const Ints bits = reinterpret_cast<Ints>(value);
    const Ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding could carry a NaN's payload into the sign; a NaN is truncated and made quiet.
    const Ints words = value == value ? rounded : (bits >> 16) | 0x40;
#ifdef __AVX512F__
    const HalfWords packed = _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(words));
#else
    const __m256i low =
        _mm256_and_si256(reinterpret_cast<__m256i>(words), _mm256_set1_epi32(0xffff));
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    const HalfWords packed = _mm256_castsi256_si128(pairs);
#endif
    memcpy(to, &packed, sizeof packed);
  }
};

template <>
struct Element<AUTOFA_F16> {
  using Type = uint16_t;

  static Floats load(const Type* from) {
    HalfWords words;
    memcpy(&words, from, sizeof words);
#ifdef __AVX512F__
    return reinterpret_cast<Floats>(_mm512_cvtph_ps(words));
#else
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(words));
#endif
  }

  static void store(Type* to, Floats value) {
#ifdef __AVX512F__
    const HalfWords packed =
        _mm512_cvtps_ph(reinterpret_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT);
#else
    const HalfWords packed =
        _mm256_cvtps_ph(reinterpret_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT);
#endif
    memcpy(to, &packed, sizeof packed);
  }
};

// The first `count` < kLanes elements at `from`, zeros in the other lanes; reads no further.
template <int Dtype>
inline Floats load_part(const typename Element<Dtype>::Type* from, int64_t count) {
#ifdef __AVX512F__
  const auto part = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (Dtype == AUTOFA_F32) {
    return reinterpret_cast<Floats>(_mm512_maskz_loadu_ps(part, from));
  } else {
    const HalfWords words = _mm256_maskz_loadu_epi16(part, from);
    return Element<Dtype>::load(reinterpret_cast<const uint16_t*>(&words));
  }
#else
  if constexpr (Dtype == AUTOFA_F32) {
    const Ints part = lane_numbers() < static_cast<int32_t>(count);
    return reinterpret_cast<Floats>(_mm256_maskload_ps(from, reinterpret_cast<__m256i>(part)));
  } else {
    typename Element<Dtype>::Type whole[kLanes] = {};
    memcpy(whole, from, count * sizeof *from);
    return Element<Dtype>::load(whole);
  }
#endif
}

// Stores the first `count` < kLanes lanes and touches nothing behind them.
template <int Dtype>
inline void store_part(typename Element<Dtype>::Type* to, Floats value, int64_t count) {
  typename Element<Dtype>::Type whole[kLanes];
  Element<Dtype>::store(whole, value);
  memcpy(to, whole, count * sizeof *to);
}

}  // namespace autofa::cpu
