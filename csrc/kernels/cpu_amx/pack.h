// Brings rows of bf16 into the layouts of the tiles, and outputs back into rows. Any stride between
// rows, any alignment; nothing is touched past the end of a row or the last row. What pads a square
// is zero.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "autofa/cpu/element.h"
#include "autofa/cpu/transpose.h"
#include "config.h"

namespace autofa::cpu_amx {

inline __mmask32 first(int64_t count) {
  return count >= 32 ? 0xffffffffu : count <= 0 ? 0u : (1u << count) - 1;
}

// Up to 32 elements, zeros behind the first `count`.
inline __m512i load_words(const uint16_t* from, int64_t count) {
  return _mm512_maskz_loadu_epi16(first(count), from);
}

// Queries as the right-hand operand of K Q^T: per chunk, one tile for each half of the unit, whose
// row k holds head dims 2k and 2k + 1 of 16 queries. Their signs are flipped if `negate`.
inline void pack_queries(const uint16_t* rows, int64_t stride, int64_t count, int64_t dims,
                         bool negate, uint16_t* to) {
  const __m512i signs = _mm512_set1_epi16(negate ? INT16_MIN : 0);
  for (int64_t d = 0; d < dims; d += kSide) {
    for (int64_t query = 0; query < kSide; query += 16, to += kOperandTile) {
      Floats pairs[16];
      AUTOFA_UNROLL for (int i = 0; i < 16; ++i) {
        const bool there = query + i < count;
        const uint16_t* row = there ? rows + (query + i) * stride + d : rows;
        pairs[i] = reinterpret_cast<Floats>(
            _mm512_xor_si512(load_words(row, there ? dims - d : 0), signs));
      }
      cpu::transpose(pairs);
      AUTOFA_UNROLL for (int i = 0; i < 16; ++i) {
        cpu::store(reinterpret_cast<float*>(to) + i * 16, pairs[i]);
      }
    }
  }
}

// A group of keys as the left-hand operand of K Q^T: per chunk, two tiles whose rows are keys.
inline void pack_keys(const uint16_t* rows, int64_t stride, int64_t count, int64_t dims,
                      uint16_t* to) {
  for (int64_t d = 0; d < dims; d += kSide) {
    for (int64_t key = 0; key < kSide; ++key, to += kSide) {
      const bool there = key < count;
      const uint16_t* row = there ? rows + key * stride + d : rows;
      _mm512_store_si512(to, load_words(row, there ? dims - d : 0));
    }
  }
}

namespace detail {

// Word i of the result: words i of two registers in turn, from lane `Begin` on.
template <int Begin>
inline __m512i interleave(__m512i even, __m512i odd) {
  alignas(64) static constexpr uint16_t lanes[32] = {
      Begin + 0,  Begin + 32, Begin + 1,  Begin + 33, Begin + 2,  Begin + 34, Begin + 3,
      Begin + 35, Begin + 4,  Begin + 36, Begin + 5,  Begin + 37, Begin + 6,  Begin + 38,
      Begin + 7,  Begin + 39, Begin + 8,  Begin + 40, Begin + 9,  Begin + 41, Begin + 10,
      Begin + 42, Begin + 11, Begin + 43, Begin + 12, Begin + 44, Begin + 13, Begin + 45,
      Begin + 14, Begin + 46, Begin + 15, Begin + 47};
  return _mm512_permutex2var_epi16(even, _mm512_load_si512(lanes), odd);
}

inline void store_transposed(Floats (&pairs)[16], uint16_t* to) {
  cpu::transpose(pairs);
  AUTOFA_UNROLL for (int i = 0; i < 16; ++i) {
    cpu::store(reinterpret_cast<float*>(to) + i * 16, pairs[i]);
  }
}

}  // namespace detail

// A group of values as the left-hand operand of V^T P: per chunk, two tiles whose rows are head
// dims and whose columns are keys. False if some value is infinite or NaN.
inline bool pack_values(const uint16_t* rows, int64_t stride, int64_t count, int64_t dims,
                        uint16_t* to) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 special = 0;
  for (int64_t d = 0; d < dims; d += kSide, to += kOperandSquare) {
    Floats low[16], high[16];
    AUTOFA_UNROLL for (int i = 0; i < 16; ++i) {
      const bool even_there = 2 * i < count, odd_there = 2 * i + 1 < count;
      const uint16_t* even_row = even_there ? rows + 2 * i * stride + d : rows;
      const uint16_t* odd_row = odd_there ? rows + (2 * i + 1) * stride + d : rows;
      const __m512i even = load_words(even_row, even_there ? dims - d : 0);
      const __m512i odd = load_words(odd_row, odd_there ? dims - d : 0);
      special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(even, exponent), exponent) |
                 _mm512_cmpeq_epi16_mask(_mm512_and_si512(odd, exponent), exponent);
      low[i] = reinterpret_cast<Floats>(detail::interleave<0>(even, odd));
      high[i] = reinterpret_cast<Floats>(detail::interleave<16>(even, odd));
    }
    detail::store_transposed(low, to);
    detail::store_transposed(high, to + kOperandTile);
  }
  return special == 0;
}

// out(query, dim) = sums(dim, query) / total(query); zeros where the total is 0 (no key was seen).
inline void store_output(const float* sums, const Floats (&total)[2], int64_t count, int64_t dims,
                         uint16_t* out, int64_t stride) {
  for (int half = 0; half < 2 && half * 16 < count; ++half) {
    const Floats inverse = 1.f / total[half];
    for (int64_t d = 0; d < dims; d += 16) {
      Floats square[16];
      AUTOFA_UNROLL for (int i = 0; i < 16; ++i) {
        const Floats value = cpu::load(sums + sum_at(d + i, half)) * inverse;
        square[i] = total[half] == 0.f ? Floats{} : value;
      }
      cpu::transpose(square);
      const auto width = static_cast<__mmask16>(first(dims - d));
      AUTOFA_UNROLL for (int i = 0; i < 16; ++i) {
        if (half * 16 + i >= count) continue;
        uint16_t words[16];
        cpu::Element<AUTOFA_BF16>::store(words, square[i]);
        _mm256_mask_storeu_epi16(out + (half * 16 + i) * stride + d, width,
                                 _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
      }
    }
  }
}

}  // namespace autofa::cpu_amx
