// Online softmax of a block of scores laid out key by key, a query per lane: no step crosses lanes.
// Scores are in units of log 2, so that weights are powers of two.
#pragma once

#include <float.h>
#include <math.h>
#include <stdint.h>

#include "autofa/cpu/mask.h"
#include "autofa/cpu/vector.h"
#include "tiles.h"

namespace autofa::cpu_flash {

// Per query: the largest score so far, the sum of weights relative to it, and the factor by which
// the latest block rescales what was summed before. Starting at the lowest finite number (rather
// than -inf) keeps queries that have seen no key free of NaN.
struct SoftmaxState {
  float* largest;
  float* sum;
  float* alpha;
  float* block_largest;

  void start(int64_t lanes) {
    for (int64_t i = 0; i < lanes; ++i) {
      largest[i] = -FLT_MAX;
      sum[i] = 0;
    }
  }

  void start_block(int64_t lanes) {
    for (int64_t i = 0; i < lanes; ++i) block_largest[i] = -FLT_MAX;
  }

  // Takes in the largest scores of the block: sets alpha, rescales the sum.
  void raise(int64_t lanes) {
    for (int64_t i = 0; i < lanes; i += kLanes) {
      const Floats before = cpu::load(largest + i);
      const Floats now = cpu::max(before, cpu::load(block_largest + i));
      const Floats factor = cpu::exp2_nonpositive(before - now);
      cpu::store(largest + i, now);
      cpu::store(alpha + i, factor);
      cpu::store(sum + i, cpu::load(sum + i) * factor);
    }
  }
};

// Hides key i of `keys` from the lanes below first_lane + i of the first vector, then takes the
// largest scores of all `Vectors`.
template <int Vectors>
void mask_diagonal(float* scores, int64_t lanes, int64_t keys, int64_t first_lane, float* largest) {
  Floats top[Vectors];
  AUTOFA_UNROLL for (int j = 0; j < Vectors; ++j) top[j] = cpu::load(largest + j * kLanes);
  for (int64_t key = 0; key < keys; ++key) {
    float* row = scores + key * lanes;
    const auto hidden = cpu::lane_numbers() < static_cast<int32_t>(first_lane + key);
    cpu::store(row, hidden ? cpu::broadcast(-INFINITY) : cpu::load(row));
    AUTOFA_UNROLL for (int j = 0; j < Vectors; ++j) {
      top[j] = cpu::max(top[j], cpu::load(row + j * kLanes));
    }
  }
  AUTOFA_UNROLL for (int j = 0; j < Vectors; ++j) cpu::store(largest + j * kLanes, top[j]);
}

// One vector of queries before an explicit mask: its first row, how many rows there are from it on,
// the key that column 0 of a block is, and the last key that lane 0 sees on a causal diagonal.
struct MaskView {
  const cpu::HeadMask& mask;
  int64_t row, rows, begin, diagonal;
};

// Adds the mask to one vector of queries and takes its largest scores; whether a key is hidden.
// A hidden score is replaced, so that a NaN in it never counts.
inline bool add_mask(const MaskView& view, float* scores, int64_t lanes, int64_t keys,
                     float* largest) {
  Floats top = cpu::load(largest);
  cpu::Ints hidden = {};
  for (int64_t key = 0; key < keys; key += kLanes) {
    const int64_t width = keys - key < kLanes ? keys - key : kLanes;
    Floats bias[kLanes];
    view.mask.load_square(view.row, view.rows, view.begin + key, width, bias);
    const auto last_seen =
        cpu::lane_numbers() +
        static_cast<int32_t>(clamp(view.diagonal - view.begin - key, -kLanes * 2, kLanes * 2));
    for (int64_t i = 0; i < width; ++i) {
      float* at = scores + (key + i) * lanes;
      const cpu::Ints gone = (bias[i] == -INFINITY) | (last_seen < static_cast<int32_t>(i));
      const Floats score = gone ? cpu::broadcast(-INFINITY) : cpu::load(at) + bias[i];
      cpu::store(at, score);
      top = cpu::max(top, score);
      hidden |= gone;
    }
  }
  cpu::store(largest, top);
  return cpu::any(hidden);
}

// Turns scores of `keys` keys into weights and adds them to the sums.
template <int Vectors>
void exponentiate(float* scores, int64_t lanes, int64_t keys, const float* largest, float* sum) {
  Floats top[Vectors], total[Vectors];
  AUTOFA_UNROLL for (int j = 0; j < Vectors; ++j) {
    top[j] = cpu::load(largest + j * kLanes);
    total[j] = Floats{};
  }
#pragma GCC unroll 2
  for (int64_t key = 0; key < keys; ++key) {
    AUTOFA_UNROLL for (int j = 0; j < Vectors; ++j) {
      float* at = scores + key * lanes + j * kLanes;
      const Floats weight = cpu::exp2_nonpositive(cpu::load(at) - top[j]);
      total[j] += weight;
      cpu::store(at, weight);
    }
  }
  AUTOFA_UNROLL for (int j = 0; j < Vectors; ++j) {
    cpu::store(sum + j * kLanes, cpu::load(sum + j * kLanes) + total[j]);
  }
}

}  // namespace autofa::cpu_flash
