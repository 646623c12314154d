// Flash attention of one panel: up to `units` units of 32 consecutive queries of one head, over all
// the keys they may see (Dao et al., "FlashAttention", 2022, with both products transposed).
//
// The work is a sequence of steps, each of one unit and one group of keys. While the vectors turn
// the scores of one step into weights, the tiles score the next and add what was weighed before to
// the outputs. Scores live for two steps and weights for two batches of steps, so both stay in the
// first-level cache; with scores of whole blocks the traffic to the second level took half the
// time.
#pragma once

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "autofa/abi.h"
#include "autofa/cpu/scratch.h"
#include "config.h"
#include "keys.h"
#include "mask.h"
#include "pack.h"
#include "products.h"
#include "softmax.h"

namespace autofa::cpu_amx {

// Where a panel lies. `diagonal` is the last key that query 0 of the head may see (negative if it
// sees none); query i sees keys 0 .. diagonal + i. Dense problems have no diagonal.
struct PanelView {
  const uint16_t* q;
  uint16_t* out;
  float* lse;
  int64_t batch, head, kv_head;  // kv_head counts through all batches
  int64_t first, queries;
  bool causal;
  int64_t diagonal;
};

// The working memory of one thread.
template <class Config>
struct PanelMemory {
  int64_t queries_size, out_size;  // of one unit, in elements
  float *out, *scores[2];
  uint16_t *queries, *weights[2];

  // False if memory is short.
  bool allocate(int64_t head_dim, int64_t head_dim_v) {
    constexpr int64_t weights_size = Config::groups * kOperandSquare;
    queries_size = squares(head_dim) * kOperandSquare;
    out_size = squares(head_dim_v) * kSumSquare;
    const int64_t floats = Config::units * out_size + 2 * kSumSquare;
    const int64_t words = Config::units * queries_size + 2 * weights_size;
    void* block = cpu::thread_scratch(floats * 4 + words * 2);
    if (!block) return false;
    scores[0] = static_cast<float*>(block);
    scores[1] = scores[0] + kSumSquare;
    weights[0] = reinterpret_cast<uint16_t*>(scores[1] + kSumSquare);
    weights[1] = weights[0] + weights_size;
    queries = weights[1] + weights_size;
    out = reinterpret_cast<float*>(queries + Config::units * queries_size);
    return true;
  }
};

template <class Config>
class Panel {
  // One unit's meeting with one group of keys.
  struct Step {
    int unit = -1;
    int64_t begin = 0, end = 0;  // end of the unit's turn
    int keys = 0;
    int buffer = 0;  // of its scores

    bool follows(const Step& other) const {
      return unit == other.unit && begin == other.begin + kSide;
    }
  };

  // Successive groups of one unit, weighed and not yet added to the outputs. Where batches end does
  // not show in the sums, which take one group after the other.
  struct Batch {
    int unit = 0;
    int64_t begin = 0, groups = 0;
    int buffer = 0;
    bool add = false;              // to outputs that hold sums already
    int64_t left = 0, shares = 0;  // chunks of outputs, and steps that they are spread over
  };

 public:
  Panel(const autofa_params& params, const PanelView& view, const PackedKeys& keys,
        const PanelMemory<Config>& memory)
      : params_(params),
        view_(view),
        keys_(keys),
        memory_(memory),
        mask_(params, view.batch, view.head),
        units_(static_cast<int>(squares(view.queries))),
        factor_(fabsf(params.scale) * kLog2e),
        turn_(turn_of(params.head_dim + params.head_dim_v)) {}

  void run() {
    for (int unit = 0; unit < units_; ++unit) {
      pack_queries(view_.q + unit * kSide * params_.q_strides[2], params_.q_strides[2],
                   view_.queries - unit * kSide, params_.head_dim, params_.scale < 0,
                   queries(unit));
      softmax_[unit].start();
    }
    Step current, following;
    bool more = next(current);
    if (more) score(current);
    products_.drain();
    while (more) {
      following = current;
      more = next(following);
      const bool weighed = absorb(current, more ? &following : nullptr);
      if (weighed) ++open_.groups;
      const bool goes_on = more && following.follows(current);
      if (!weighed || open_.groups == Config::groups || !goes_on) close();
      current = following;
    }
    flush();
    for (int unit = 0; unit < units_; ++unit) finish(unit);
  }

 private:
  // Keys that a unit meets before it is another's turn: half of a second-level cache of 2 MB.
  static int64_t turn_of(int64_t dims) {
    return clamp((int64_t{1} << 19) / dims, 8 * kSide, int64_t{1} << 19) / kSide * kSide;
  }

  uint16_t* queries(int unit) const { return memory_.queries + unit * memory_.queries_size; }
  float* out(int unit) const { return memory_.out + unit * memory_.out_size; }

  // The number of keys that the first and the last query of a unit see.
  int64_t seen_by_all(int unit) const {
    if (!view_.causal) return params_.seqlen_k;
    return clamp(view_.diagonal + view_.first + unit * kSide + 1, 0, params_.seqlen_k);
  }
  int64_t seen_by_some(int unit) const {
    if (!view_.causal) return params_.seqlen_k;
    const int64_t last = smaller((unit + 1) * kSide, view_.queries) - 1;
    return clamp(view_.diagonal + view_.first + last + 1, 0, params_.seqlen_k);
  }

  // The step after `step`: the next group, the next unit, or the next keys of the first unit that
  // sees them.
  bool next(Step& step) const {
    if (step.unit >= 0) step.buffer ^= 1;
    step.begin += kSide;
    while (step.begin >= step.end) {
      if (++step.unit == units_) {
        step.unit = 0;
        turn_begin_ += turn_;
      }
      if (turn_begin_ >= seen_by_some(units_ - 1)) return false;
      step.begin = turn_begin_;
      step.end = smaller(turn_begin_ + turn_, seen_by_some(step.unit));
    }
    step.keys = static_cast<int>(smaller(kSide, step.end - step.begin));
    return true;
  }

  void score(const Step& step) {
    keys_.score(view_.kv_head, step.begin, queries(step.unit), memory_.scores[step.buffer],
                products_);
  }

  // Lets the tiles add `chunks` chunks of the closed batch.
  void combine(int64_t chunks) {
    const int64_t chunk = memory_.out_size / kSumSquare - closed_.left;
    keys_.combine(view_.kv_head, closed_.begin, closed_.groups, memory_.weights[closed_.buffer],
                  closed_.add, chunk, chunks, out(closed_.unit), products_);
    closed_.left -= chunks;
  }

  // The open batch is complete: from now on it is being added.
  void close() {
    if (open_.groups == 0) return;
    combine(closed_.left);
    products_.drain();
    closed_ = open_;
    closed_.add = started_[closed_.unit];
    closed_.left = memory_.out_size / kSumSquare;
    closed_.shares = closed_.groups;
    started_[closed_.unit] = true;
    open_.groups = 0;
    open_.buffer ^= 1;
  }

  // Adds all that is weighed.
  void flush() {
    close();
    combine(closed_.left);
    products_.drain();
  }

  // Turns the scores of `step` into weights, and meanwhile scores `after` and adds a share of the
  // closed batch. False if the weights are not to be added.
  bool absorb(const Step& step, const Step* after) {
    float* scores = memory_.scores[step.buffer];
    SoftmaxState& softmax = softmax_[step.unit];
    float factor = factor_;
    const Seen seen = hide(step, scores, factor);
    const int64_t keys = (step.keys + 7) / 8 * 8;
    if (seen.some_visible) {
      hide_keys(step.keys, keys, scores);
      Floats largest[2], alpha[2];
      largest_scores(scores, keys, largest);
      if (too_large(largest, factor)) {
        multiply_scores(scores, keys, factor);
        for (Floats& score : largest) score *= factor;
        factor = 1;
      }
      for (Floats& score : largest) score = cpu::max(score * factor, cpu::broadcast(-FLT_MAX));
      if (softmax.must_rise(largest)) {
        flush();
        softmax.rise(largest, alpha);
        if (started_[step.unit]) rescale(out(step.unit), alpha);
      }
    }
    if (closed_.left > 0) combine((closed_.left + closed_.shares - 1) / closed_.shares--);
    if (after) score(*after);
    if (!seen.some_visible) {
      products_.drain();
      return false;
    }
    if (open_.groups == 0) {
      open_.unit = step.unit;
      open_.begin = step.begin;
    }
    uint16_t* weights = memory_.weights[open_.buffer] + open_.groups * kOperandSquare;
    turn_into_weights(scores, keys, factor, softmax, weights);
    products_.drain();
    if (!seen.some_hidden || !keys_.special(view_.kv_head, step.begin)) return true;
    flush();
    add_by_visibility(step, scores, weights);
    return false;
  }

  // Applies masks. `factor` becomes 1 where scores had to be multiplied by it.
  Seen hide(const Step& step, float* scores, float& factor) const {
    Seen seen;
    seen.some_visible = true;
    // -inf times a factor that counts as zero would be NaN.
    const bool vanishing = factor < FLT_MIN;
    if (vanishing) {
      vanish(scores, step.keys);
      factor = 1;
    }
    if (params_.mask != AUTOFA_MASK_NONE) {
      const int64_t query = step.unit * kSide;
      seen = mask_.apply(view_.first + query, smaller(view_.queries - query, kSide), step.begin,
                         step.keys, factor, scores);
      if (mask_.additive()) factor = 1;
    }
    // Keys of the group that no query of the unit sees have weights of 0, which hide no NaN.
    seen.some_hidden |= step.keys < smaller(params_.seqlen_k - step.begin, kSide);
    const int64_t common = seen_by_all(step.unit) - step.begin;
    if (common < step.keys) {
      seen.some_hidden = true;
      hide_above_diagonal(common > 0 ? common : 0, step.keys,
                          view_.diagonal + view_.first + step.unit * kSide - step.begin, scores);
    }
    return seen;
  }

  // Whether the rounding of a score times `factor` could leave the range of a weight.
  static bool too_large(const Floats (&largest)[2], float factor) {
    constexpr float limit = 1 << 28;
    const auto over = (largest[0] * factor > limit) | (largest[0] * factor < -limit) |
                      (largest[1] * factor > limit) | (largest[1] * factor < -limit);
    const __m512i bits = reinterpret_cast<__m512i>(over);
    return factor != 1 && _mm512_test_epi32_mask(bits, bits) != 0;
  }

  // With as many steps of products for each eight keys as there are to do.
  void turn_into_weights(const float* scores, int64_t keys, float factor, SoftmaxState& softmax,
                         uint16_t* weights) {
    const int64_t per_eight = (products_.todo() * 8 + keys - 1) / keys;
    const auto work = per_eight == 0   ? weigh<0>
                      : per_eight == 1 ? weigh<1>
                      : per_eight == 2 ? weigh<2>
                                       : weigh<4>;
    work(scores, keys, factor, softmax, weights, products_);
    for (int64_t pair = keys / 2; pair < kSide / 2; ++pair) {
      memset(weights + pair * kSide, 0, kTileRowBytes);
      memset(weights + pair * kSide + kOperandTile, 0, kTileRowBytes);
    }
  }

  void rescale(float* sums, const Floats (&alpha)[2]) const {
    for (int64_t d = 0; d < memory_.out_size / kSide; ++d) {
      for (int half = 0; half < 2; ++half) {
        float* at = sums + sum_at(d, half);
        cpu::store(at, cpu::load(at) * alpha[half]);
      }
    }
  }

  // out += V^T weights, one key at a time: a weight of 0 does not hide a NaN or an infinity in V,
  // so hidden pairs must not be multiplied at all.
  void add_by_visibility(const Step& step, const float* scores, const uint16_t* weights) {
    float* sums = out(step.unit);
    if (!started_[step.unit]) memset(sums, 0, memory_.out_size * sizeof(float));
    started_[step.unit] = true;
    const uint16_t* values = keys_.values(view_.kv_head, step.begin);
    for (int64_t key = 0; key < step.keys; ++key) {
      for (int half = 0; half < 2; ++half) {
        const __m512 score = reinterpret_cast<__m512>(cpu::load(scores + sum_at(key, half)));
        const __mmask16 visible = _mm512_cmp_ps_mask(score, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
        if (!visible) continue;
        const __m512i pairs = _mm512_load_si512(weights + half * kOperandTile + key / 2 * kSide);
        const __m512 weight = _mm512_castsi512_ps(
            key & 1 ? _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000)))
                    : _mm512_slli_epi32(pairs, 16));
        for (int64_t d = 0; d < memory_.out_size / kSide; ++d) {
          const uint16_t word = values[d * kSide + key];
          const __m512 value = _mm512_castsi512_ps(_mm512_set1_epi32(word << 16));
          float* at = sums + sum_at(d, half);
          _mm512_store_ps(at, _mm512_mask3_fmadd_ps(weight, value, _mm512_load_ps(at), visible));
        }
      }
    }
  }

  void finish(int unit) const {
    const SoftmaxState& softmax = softmax_[unit];
    const int64_t query = unit * kSide, count = smaller(view_.queries - query, kSide);
    store_output(out(unit), softmax.sum, count, params_.head_dim_v,
                 view_.out + query * params_.out_strides[2], params_.out_strides[2]);
    if (!view_.lse) return;
    const float ln2 = 0.693147180559945309417f;
    for (int64_t i = 0; i < count; ++i) {
      const float sum = softmax.sum[i / 16][i % 16];
      view_.lse[query + i] = sum == 0 ? -INFINITY : softmax.top[i / 16][i % 16] * ln2 + logf(sum);
    }
  }

  const autofa_params& params_;
  const PanelView& view_;
  const PackedKeys& keys_;
  PanelMemory<Config> memory_;
  const MaskRows mask_;
  const int units_;
  const float factor_;  // scores times this are in units of log 2
  const int64_t turn_;
  mutable int64_t turn_begin_ = 0;
  Products products_;
  Batch open_, closed_;
  SoftmaxState softmax_[Config::units];
  bool started_[Config::units] = {};  // whether the outputs hold sums, or are being given them
};

}  // namespace autofa::cpu_amx
