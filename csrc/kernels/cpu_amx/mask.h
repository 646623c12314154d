// Hides scores from queries, and adds additive masks to them, in blocks laid out key by key.
// Hidden scores become -inf, whatever they were.
#pragma once

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include "autofa/abi.h"
#include "autofa/cpu/element.h"
#include "autofa/cpu/transpose.h"
#include "config.h"
#include "pack.h"

namespace autofa::cpu_amx {

constexpr float kLog2e = 1.44269504088896340736f;

// What a mask did to the real queries of a unit.
struct Seen {
  bool some_hidden = false;
  bool some_visible = false;
};

inline cpu::Ints lanes_below(int64_t count) {
  return cpu::lane_numbers() < static_cast<int32_t>(clamp(count, 0, kLanes));
}

// The explicit mask of one head.
class MaskRows {
 public:
  MaskRows(const autofa_params& p, int64_t batch, int64_t head)
      : additive_(p.mask == AUTOFA_MASK_ADDITIVE),
        dtype_(p.mask_dtype),
        row_(p.mask_strides[2]),
        key_(p.mask_strides[3]),
        data_(static_cast<const char*>(p.attn_mask) +
              (batch * p.mask_strides[0] + head * p.mask_strides[1]) * bytes()) {}

  bool additive() const { return additive_; }

  // Applies it to scores of queries [query, query + queries) and keys [key, key + keys); with an
  // additive mask the scores are first multiplied by `factor`.
  Seen apply(int64_t query, int64_t queries, int64_t key, int64_t keys, float factor,
             float* scores) const {
    Seen seen;
    for (int64_t i = 0; i < keys; i += 16) {
      for (int half = 0; half < 2 && half * 16 < queries; ++half) {
        Floats bias[16];
        const int64_t rows = smaller(queries - half * 16, 16);
        load_square(query + half * 16, rows, key + i, smaller(keys - i, 16), bias);
        apply_square(bias, smaller(keys - i, 16), lanes_below(rows), factor,
                     scores + sum_at(i, half), seen);
      }
    }
    return seen;
  }

 private:
  int64_t bytes() const { return !additive_ ? 1 : dtype_ == AUTOFA_F32 ? 4 : 2; }

  // bias[key](query): what is added to a score.
  void load_square(int64_t query, int64_t rows, int64_t key, int64_t keys,
                   Floats (&bias)[16]) const {
    const char* at = data_ + (query * row_ + key * key_) * bytes();
    for (int64_t i = 0; i < 16; ++i) {
      bias[i] = i >= rows            ? Floats{}
                : i > 0 && row_ == 0 ? bias[0]
                                     : load_row(at + i * row_ * bytes(), keys);
    }
    cpu::transpose(bias);
  }

  Floats load_row(const char* at, int64_t keys) const {
    alignas(64) char gathered[64] = {};
    if (key_ != 1) {
      for (int64_t i = 0; i < keys; ++i) {
        const char* from = at + i * key_ * bytes();
        for (int64_t b = 0; b < bytes(); ++b) gathered[i * bytes() + b] = from[b];
      }
      at = gathered;
    }
    const auto there = static_cast<__mmask16>(first(keys));
    if (!additive_) {
      const __m128i attends = _mm_maskz_loadu_epi8(there, at);
      const __mmask16 hidden = _mm_testn_epi8_mask(attends, attends);
      return reinterpret_cast<Floats>(_mm512_maskz_mov_ps(hidden, _mm512_set1_ps(-INFINITY)));
    }
    if (dtype_ == AUTOFA_F32) return reinterpret_cast<Floats>(_mm512_maskz_loadu_ps(there, at));
    const __m256i words = _mm256_maskz_loadu_epi16(there, at);
    if (dtype_ == AUTOFA_F16) return reinterpret_cast<Floats>(_mm512_cvtph_ps(words));
    return reinterpret_cast<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }

  void apply_square(const Floats (&bias)[16], int64_t keys, cpu::Ints real, float factor,
                    float* scores, Seen& seen) const {
    cpu::Ints hidden_somewhere = {}, visible_somewhere = {};
    const Floats lowest = cpu::broadcast(-FLT_MAX);
    for (int64_t i = 0; i < keys; ++i) {
      const auto hidden = bias[i] == -INFINITY;
      Floats value = cpu::load(scores + i * 16);
      // The lowest finite numbers are common in masks; they must not become infinite.
      if (additive_) value = value * factor + cpu::max(lowest, bias[i] * kLog2e);
      cpu::store(scores + i * 16, hidden ? cpu::broadcast(-INFINITY) : value);
      hidden_somewhere |= hidden & real;
      visible_somewhere |= ~hidden & real;
    }
    const auto any = [](cpu::Ints found) {
      const __m512i bits = reinterpret_cast<__m512i>(found);
      return _mm512_test_epi32_mask(bits, bits) != 0;
    };
    seen.some_hidden |= any(hidden_somewhere);
    seen.some_visible |= any(visible_somewhere);
  }

  const bool additive_;
  const int32_t dtype_;
  const int64_t row_, key_;  // strides
  const char* const data_;
};

// Hides key i of [from, keys) from the queries before i - diagonal.
inline void hide_above_diagonal(int64_t from, int64_t keys, int64_t diagonal, float* scores) {
  for (int64_t key = from; key < keys; ++key) {
    for (int half = 0; half < 2; ++half) {
      float* at = scores + sum_at(key, half);
      const auto hidden = lanes_below(key - diagonal - half * 16);
      cpu::store(at, hidden ? cpu::broadcast(-INFINITY) : cpu::load(at));
    }
  }
}

inline void hide_keys(int64_t from, int64_t keys, float* scores) {
  for (int64_t key = from; key < keys; ++key) {
    for (int half = 0; half < 2; ++half) {
      cpu::store(scores + sum_at(key, half), cpu::broadcast(-INFINITY));
    }
  }
}

}  // namespace autofa::cpu_amx
