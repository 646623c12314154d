// Online softmax of a block of scores laid out key by key, a query per lane: no step crosses lanes.
// Scores enter in units of log 2 once they are multiplied by `factor`.
#pragma once

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include "autofa/cpu/vector.h"
#include "config.h"
#include "products.h"

namespace autofa::cpu_amx {

// 2^t, relative error below 7.5e-5: a twentieth of what rounding it to bf16 costs. Where denormals
// count as zero, 0 below t = -126. NaN stays NaN.
inline Floats exp2_coarse(Floats t) {
  const __m512 x = reinterpret_cast<__m512>(t);
  const Floats f = reinterpret_cast<Floats>(_mm512_reduce_ps(x, 0x09));  // t - floor(t)
  Floats p = f * 0.07802455127239227f + 0.2260671854019165f;
  p = p * f + 0.6958335041999817f;
  p = p * f + 0.9999252557754517f;
  return reinterpret_cast<Floats>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), x));
}

// Per query: a score that weights are relative to, and the sum of weights. The score is the largest
// one or up to `slack` below it: it follows only when it must, since that rescales the outputs.
// Starting at the lowest finite number (rather than -inf) keeps queries that have seen no key free
// of NaN.
struct SoftmaxState {
  static constexpr float slack = 8;

  Floats top[2];
  Floats sum[2];

  void start() {
    for (int half = 0; half < 2; ++half) {
      top[half] = cpu::broadcast(-FLT_MAX);
      sum[half] = Floats{};
    }
  }

  // Whether weights of scores up to `largest` could grow too large.
  bool must_rise(const Floats (&largest)[2]) const {
    const __m512i over =
        reinterpret_cast<__m512i>((largest[0] > top[0] + slack) | (largest[1] > top[1] + slack));
    return _mm512_test_epi32_mask(over, over) != 0;
  }

  // Makes weights relative to `largest` where it is larger; `alpha` is the factor for what was
  // summed before.
  void rise(const Floats (&largest)[2], Floats (&alpha)[2]) {
    for (int half = 0; half < 2; ++half) {
      const Floats now = cpu::max(largest[half], top[half]);
      alpha[half] = cpu::exp2_nonpositive(top[half] - now);
      top[half] = now;
      sum[half] *= alpha[half];
    }
  }
};

// The largest of `keys` scores of each query, -inf if there is none; NaN is passed over.
inline void largest_scores(const float* scores, int64_t keys, Floats (&largest)[2]) {
  Floats found[2][2];
  for (auto& row : found) row[0] = row[1] = cpu::broadcast(-INFINITY);
  for (int64_t key = 0; key < keys; key += 8) {
    const float* at = scores + sum_at(key, 0);
    AUTOFA_UNROLL for (int i = 0; i < 8; ++i) {
      AUTOFA_UNROLL for (int half = 0; half < 2; ++half) {
        Floats& best = found[i & 1][half];
        best = cpu::max(cpu::load(at + half * kSumTile + i * 16), best);
      }
    }
  }
  for (int half = 0; half < 2; ++half) largest[half] = cpu::max(found[0][half], found[1][half]);
}

inline void multiply_scores(float* scores, int64_t keys, float factor) {
  for (int64_t key = 0; key < keys; ++key) {
    for (int half = 0; half < 2; ++half) {
      float* at = scores + sum_at(key, half);
      cpu::store(at, cpu::load(at) * factor);
    }
  }
}

// Scores times 0; by a subtraction, since compilers here take a product with 0 for 0 even if the
// score is NaN.
inline void vanish(float* scores, int64_t keys) {
  for (int64_t key = 0; key < keys; ++key) {
    for (int half = 0; half < 2; ++half) {
      float* at = scores + sum_at(key, half);
      const Floats score = cpu::load(at);
      cpu::store(at, score - score);
    }
  }
}

// Two rows of f32 as one row of pairs of bf16. A NaN may become a number: its query's sum of
// weights is NaN all the same.
inline __m512i pair_rows(Floats even, Floats odd) {
  const cpu::Ints half = cpu::Ints{} + 0x8000;
  const cpu::Ints low = reinterpret_cast<cpu::Ints>(even) + half;
  const cpu::Ints high = reinterpret_cast<cpu::Ints>(odd) + half;
  return _mm512_mask_mov_epi16(_mm512_srli_epi32(reinterpret_cast<__m512i>(low), 16), 0xaaaaaaaau,
                               reinterpret_cast<__m512i>(high));
}

// Turns the scores of `keys` keys (a multiple of 8) into weights, adds these to the sums, and
// stores them as the right-hand operand of V^T P. Meanwhile does `PerEight` steps of `products` for
// each eight keys.
template <int PerEight>
void weigh(const float* scores, int64_t keys, float factor, SoftmaxState& state, uint16_t* weights,
           Products& products) {
  const Floats scale = cpu::broadcast(factor);
  const Floats top[2] = {state.top[0], state.top[1]};
  Floats sum[2][2] = {};
  for (int64_t key = 0; key < keys; key += 8) {
    const float* from = scores + sum_at(key, 0);
    uint16_t* to = weights + key / kSide * kOperandSquare + key % kSide / 2 * kSide;
    AUTOFA_UNROLL for (int pair = 0; pair < 4; ++pair) {
      AUTOFA_UNROLL for (int half = 0; half < 2; ++half) {
        const float* at = from + half * kSumTile + pair * 32;
        const Floats even = exp2_coarse(cpu::load(at) * scale - top[half]);
        const Floats odd = exp2_coarse(cpu::load(at + 16) * scale - top[half]);
        _mm512_store_si512(to + half * kOperandTile + pair * 32, pair_rows(even, odd));
        sum[0][half] += even;
        sum[1][half] += odd;
      }
      if constexpr (PerEight == 1) {
        if (pair == 0) products.advance<0>();
        if (pair == 1) products.advance<1>();
        if (pair == 2) products.advance<2>();
        if (pair == 3) products.advance<3>();
      } else if constexpr (PerEight == 2) {
        if (pair % 2 == 0) {
          products.advance<0>();
          products.advance<1>();
        } else {
          products.advance<2>();
          products.advance<3>();
        }
      } else if constexpr (PerEight == 4) {
        products.advance<0>();
        products.advance<1>();
        products.advance<2>();
        products.advance<3>();
      }
    }
  }
  for (int half = 0; half < 2; ++half) state.sum[half] += sum[0][half] + sum[1][half];
}

}  // namespace autofa::cpu_amx
