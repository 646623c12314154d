// Sums and maxima across the lanes of registers.
#pragma once

#include "autofa/cpu/transpose.h"
#include "autofa/cpu/vector.h"

namespace autofa::cpu {
namespace detail {

template <int Half>
inline void fold(Floats (&rows)[kLanes]) {
  if constexpr (Half < kLanes) {
    AUTOFA_UNROLL for (int i = 0; i < kLanes; i += 2 * Half) {
      exchange<Half>(rows[i], rows[i + Half], std::make_integer_sequence<int, kLanes>());
      rows[i] += rows[i + Half];
    }
    fold<Half * 2>(rows);
  }
}

}  // namespace detail

// Lane i of the result is the sum of the lanes of rows[i]; destroys the rows. One addition for two
// shuffles, kLanes - 1 times, where summing each row alone takes log2(kLanes) of each per row.
inline Floats sums_of_lanes(Floats (&rows)[kLanes]) {
  detail::fold<1>(rows);
  return rows[0];
}

inline float sum_of_lanes(Floats value) {
  float total = 0;
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) value[i] += value[i + half];
  }
  total = value[0];
  return total;
}

// Where a lane is NaN the result is that of some others.
inline float largest_lane(Floats value) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(value));
#else
  const __m256 x = reinterpret_cast<__m256>(value);
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#endif
}

}  // namespace autofa::cpu
