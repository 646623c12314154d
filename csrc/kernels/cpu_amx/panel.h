// Flash attention of one panel: up to `units` units of 32 consecutive queries of one head, over all
// the keys they may see (Dao et al., "FlashAttention", 2022, with both products transposed).
//
// The work is a sequence of blocks, each of one unit and up to `groups` groups of keys. While the
// vectors turn the scores of one block into weights, the tiles multiply for its two neighbours.
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
    constexpr int64_t scores_size = Config::groups * kSumSquare;
    constexpr int64_t weights_size = Config::groups * kOperandSquare;
    queries_size = squares(head_dim) * kOperandSquare;
    out_size = squares(head_dim_v) * kSumSquare;
    const int64_t floats = Config::units * out_size + 2 * scores_size;
    const int64_t words = Config::units * queries_size + 2 * weights_size;
    void* block = cpu::thread_scratch(floats * 4 + words * 2);
    if (!block) return false;
    scores[0] = static_cast<float*>(block);
    scores[1] = scores[0] + scores_size;
    out = scores[1] + scores_size;
    weights[0] = reinterpret_cast<uint16_t*>(out + Config::units * out_size);
    weights[1] = weights[0] + weights_size;
    queries = weights[1] + weights_size;
    return true;
  }
};

template <class Config>
class Panel {
  // One unit's meeting with the keys [begin, begin + keys).
  struct Block {
    int unit = -1;
    int64_t begin = 0, keys = 0;
    int buffer = 0;

    int64_t groups() const { return squares(keys); }
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
        factor_(fabsf(params.scale) * kLog2e) {}

  void run() {
    for (int unit = 0; unit < units_; ++unit) {
      pack_queries(view_.q + unit * kSide * params_.q_strides[2], params_.q_strides[2],
                   view_.queries - unit * kSide, params_.head_dim, params_.scale < 0,
                   queries(unit));
      softmax_[unit].start();
    }
    plan();
    Block previous, current, following;
    bool more = next(current);
    if (more) {
      multiply_qk(current);
      products_.drain();
    }
    while (more) {
      following = current;
      more = next(following);
      const bool used = absorb(previous, current, more ? &following : nullptr);
      previous = used ? current : Block();
      current = following;
    }
    if (previous.unit >= 0) multiply_pv(previous);
    products_.drain();
    for (int unit = 0; unit < units_; ++unit) finish(unit);
  }

 private:
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

  // Blocks of equal size, of whole groups.
  void plan() {
    const int64_t groups = squares(seen_by_some(units_ - 1));
    const int64_t blocks = (groups + Config::groups - 1) / Config::groups;
    block_ = blocks ? (groups + blocks - 1) / blocks * kSide : kSide;
  }

  // The block after `block`: the next unit's, or the next keys of the first unit that sees them.
  bool next(Block& block) const {
    if (block.unit >= 0) block.buffer ^= 1;
    for (;;) {
      if (++block.unit == units_) {
        block.unit = 0;
        block.begin += block_;
        if (block.begin >= seen_by_some(units_ - 1)) return false;
      }
      const int64_t end = seen_by_some(block.unit);
      if (block.begin < end) {
        block.keys = smaller(block_, end - block.begin);
        return true;
      }
      if (block.unit == units_ - 1) return false;
    }
  }

  void multiply_qk(const Block& block) {
    keys_.score(view_.kv_head, block.begin, block.groups(), queries(block.unit),
                memory_.scores[block.buffer], products_);
  }

  void multiply_pv(const Block& block) {
    keys_.combine(view_.kv_head, block.begin, block.groups(), memory_.weights[block.buffer],
                  started_[block.unit], out(block.unit), products_);
    started_[block.unit] = true;
  }

  // Turns the scores of `block` into weights, and meanwhile adds `before` to the outputs and scores
  // `after`. False if nothing of the block is to be added.
  bool absorb(const Block& before, const Block& block, const Block* after) {
    float* scores = memory_.scores[block.buffer];
    uint16_t* weights = memory_.weights[block.buffer];
    SoftmaxState& softmax = softmax_[block.unit];
    float factor = factor_;
    const Seen seen = hide(block, scores, factor);
    Floats largest[2], alpha[2];
    bool raised = false;
    const int64_t keys = (block.keys + 7) / 8 * 8;
    hide_keys(block.keys, keys, scores);
    if (seen.some_visible) {
      largest_scores(scores, keys, largest);
      if (too_large(largest, factor)) {
        multiply_scores(scores, keys, factor);
        for (Floats& score : largest) score *= factor;
        factor = 1;
      }
      for (Floats& score : largest) score = cpu::max(score * factor, cpu::broadcast(-FLT_MAX));
      raised = softmax.raise(largest, alpha);
    }
    if (before.unit >= 0) multiply_pv(before);
    if (after) multiply_qk(*after);
    if (seen.some_visible) {
      turn_into_weights(scores, keys, factor, softmax, weights);
      const int64_t blank = block.groups() * kSide - keys;
      for (int64_t key = keys; key < keys + blank; key += 2) {
        uint16_t* at = weights + key / kSide * kOperandSquare + key % kSide / 2 * kSide;
        memset(at, 0, kTileRowBytes);
        memset(at + kOperandTile, 0, kTileRowBytes);
      }
    }
    products_.drain();
    if (raised && started_[block.unit]) rescale(out(block.unit), alpha);
    if (!seen.some_visible) return false;
    if (seen.some_hidden && keys_.special(view_.kv_head, block.begin, block.keys)) {
      add_by_visibility(block, scores, weights);
      return false;
    }
    return true;
  }

  // Applies masks. `factor` becomes 1 where scores had to be multiplied by it.
  Seen hide(const Block& block, float* scores, float& factor) const {
    Seen seen;
    seen.some_visible = true;
    // -inf times a factor that counts as zero would be NaN.
    const bool vanishing = factor < FLT_MIN;
    if (vanishing) {
      multiply_scores(scores, block.keys, 0);
      factor = 1;
    }
    if (params_.mask != AUTOFA_MASK_NONE) {
      const int64_t query = block.unit * kSide;
      seen = mask_.apply(view_.first + query, smaller(view_.queries - query, kSide), block.begin,
                         block.keys, factor, scores);
      if (mask_.additive()) factor = 1;
    }
    const int64_t common = seen_by_all(block.unit) - block.begin;
    if (common < block.keys) {
      seen.some_hidden = true;
      hide_above_diagonal(common > 0 ? common : 0, block.keys,
                          view_.diagonal + view_.first + block.unit * kSide - block.begin, scores);
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

  // As many steps of products for each eight keys as there are to do.
  void turn_into_weights(const float* scores, int64_t keys, float factor, SoftmaxState& softmax,
                         uint16_t* weights) {
    const int64_t per_eight = (products_.todo() * 8 + keys - 1) / keys;
    const auto work = per_eight == 0   ? weigh<0>
                      : per_eight == 1 ? weigh<1>
                      : per_eight == 2 ? weigh<2>
                                       : weigh<4>;
    work(scores, keys, factor, softmax, weights, products_);
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
  void add_by_visibility(const Block& block, const float* scores, const uint16_t* weights) {
    float* sums = out(block.unit);
    if (!started_[block.unit]) memset(sums, 0, memory_.out_size * sizeof(float));
    started_[block.unit] = true;
    const uint16_t* values = keys_.values(view_.kv_head, block.begin);
    const int64_t chunks = memory_.out_size / kSumSquare;
    for (int64_t key = 0; key < block.keys; ++key) {
      for (int half = 0; half < 2; ++half) {
        const __m512 score = reinterpret_cast<__m512>(cpu::load(scores + sum_at(key, half)));
        const __mmask16 visible = _mm512_cmp_ps_mask(score, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
        if (!visible) continue;
        const __m512i pairs = _mm512_load_si512(weights + key / kSide * kOperandSquare +
                                                half * kOperandTile + key % kSide / 2 * kSide);
        const __m512 weight = _mm512_castsi512_ps(
            key & 1 ? _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000)))
                    : _mm512_slli_epi32(pairs, 16));
        for (int64_t d = 0; d < chunks * kSide; ++d) {
          const uint16_t word = values[(key / kSide * chunks + d / kSide) * kOperandSquare +
                                       d % kSide * kSide + key % kSide];
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
  int64_t block_ = 0;
  Products products_;
  SoftmaxState softmax_[Config::units];
  bool started_[Config::units] = {};  // whether the outputs hold sums yet
};

}  // namespace autofa::cpu_amx
