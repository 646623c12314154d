// Flash attention of one panel: up to `max_lanes` consecutive queries of one head, over all the
// keys they may see (Dao et al., "FlashAttention", 2022, with both products transposed).
#pragma once

#include <stdint.h>

#include "autofa/abi.h"
#include "autofa/cpu/finite.h"
#include "autofa/cpu/mask.h"
#include "autofa/cpu/scratch.h"
#include "config.h"
#include "rows.h"
#include "softmax.h"
#include "tiles.h"

namespace autofa::cpu_flash {

// Where a panel lies. `diagonal` is the last key that the panel's first query may see (negative if
// it sees none); query i sees keys 0 .. diagonal + i. Dense problems have no diagonal. `first` is
// the panel's first query, as a row of the explicit mask.
template <class Type>
struct PanelView {
  const Type *q, *k, *v;
  Type* out;
  float* lse;
  int64_t queries;
  int vectors;
  bool causal;
  int64_t diagonal;
  int64_t first;
  cpu::HeadMask mask;
};

// The working memory of one thread, for panels of any width.
template <class Config>
struct PanelMemory {
  static constexpr int64_t block_rows = Config::block_k + Config::max_lanes;

  float *q, *out, *scores, *converted;
  SoftmaxState softmax;

  // False if memory is short.
  bool allocate(int64_t head_dim, int64_t head_dim_v) {
    constexpr int64_t lanes = Config::max_lanes;
    const int64_t widest = head_dim > head_dim_v ? head_dim : head_dim_v;
    const int64_t copies = Config::dtype == AUTOFA_F32 ? 0 : block_rows * widest;
    const int64_t floats = (head_dim + head_dim_v + block_rows + 4) * lanes + copies;
    float* at = static_cast<float*>(cpu::thread_scratch(floats * sizeof(float)));
    if (!at) return false;
    const auto take = [&at](int64_t count) {
      float* taken = at;
      at += count;
      return taken;
    };
    q = take(head_dim * lanes);
    out = take(head_dim_v * lanes);
    scores = take(block_rows * lanes);
    softmax = {take(lanes), take(lanes), take(lanes), take(lanes)};
    converted = take(copies);
    return true;
  }
};

template <class Config>
class Panel {
  using Type = typename Config::Type;
  static constexpr int max_vectors = Config::max_vectors;
  using Seen = Staircase<max_vectors>;

 public:
  Panel(const autofa_params& params, const PanelView<Type>& view, const PanelMemory<Config>& memory)
      : params_(params), view_(view), memory_(memory), lanes_(view.vectors * kLanes) {}

  void run() {
    const float log2e = 1.44269504088896340736f;
    load_queries<Config::dtype>(view_.q, params_.q_strides[2], view_.queries, params_.head_dim,
                                params_.scale * log2e, memory_.q, lanes_);
    memory_.softmax.start(lanes_);
    if (view_.mask) {
      run_masked();
    } else {
      run_plain();
    }
    finish();
  }

 private:
  void run_plain() {
    const int64_t common = view_.causal ? clamp(view_.diagonal + 1, 0, params_.seqlen_k)
                                        : params_.seqlen_k;  // keys that every query sees
    const int64_t last = seen_by(view_.vectors - 1);
    const int64_t block = block_size(last);
    int64_t begin = 0;
    while (last - begin > block && begin + block <= common) {
      absorb(begin, begin + block, begin + block);
      begin += block;
    }
    if (begin < last) absorb(begin, common, last);
  }

  // With an explicit mask every vector meets every key of a block, and the mask hides some of them;
  // blocks that it hides from all queries are skipped.
  void run_masked() {
    const int64_t last = seen_by(view_.vectors - 1);
    const int64_t block = block_size(last);
    bool first = true;
    for (int64_t begin = 0; begin < last; begin += block) {
      const int64_t end = clamp(begin + block, begin, last);
      if (view_.mask.hides(view_.first, view_.queries, begin, end - begin)) continue;
      absorb_masked(begin, end, first);
      first = false;
    }
  }

  // The number of keys that some query of vector j sees.
  int64_t seen_by(int vector) const {
    if (!view_.causal) return params_.seqlen_k;
    return clamp(view_.diagonal + int64_t{vector + 1} * kLanes, 0, params_.seqlen_k);
  }

  // Blocks of equal size, of whole tiles.
  int64_t block_size(int64_t keys) const {
    constexpr int64_t tile = Config::tile_rows(Config::max_vectors);
    const int64_t blocks = (keys + Config::block_k - 1) / Config::block_k;
    if (blocks < 2) return Config::block_k;
    const int64_t size = ((keys + blocks - 1) / blocks + tile - 1) / tile * tile;
    return size < Config::block_k ? size : Config::block_k;
  }

  // Keys [begin, end) enter the softmax and the output; those before `common` are seen by all.
  void absorb(int64_t begin, int64_t common, int64_t end) {
    Seen seen;
    for (int j = 0; j < max_vectors; ++j) {
      seen.end[j] = j < view_.vectors ? clamp(seen_by(j), begin, end) - begin : end - begin;
    }
    const Rows keys =
        rows_as_f32<Config::dtype>(view_.k + begin * params_.k_strides[2], params_.k_strides[2],
                                   end - begin, params_.head_dim, memory_.converted);
    SoftmaxState& softmax = memory_.softmax;
    softmax.start_block(lanes_);
    multiply_qk(keys, 0, common - begin, 0, softmax.block_largest);
    for_each_stair(common - begin, seen, [&](int vector, int64_t first, int64_t count) {
      multiply_qk(keys, first, first + count, vector, nullptr);
      const int64_t hidden = begin + first - view_.diagonal - vector * kLanes;
      with_constant<max_vectors>(view_.vectors - vector, [&](auto width) {
        mask_diagonal<width>(scores(first, vector), lanes_, count, hidden,
                             softmax.block_largest + vector * kLanes);
      });
    });
    softmax.raise(lanes_);
    weigh(0, common - begin, 0);
    for_each_stair(common - begin, seen,
                   [&](int vector, int64_t first, int64_t count) { weigh(first, count, vector); });
    const Rows values =
        rows_as_f32<Config::dtype>(view_.v + begin * params_.v_strides[2], params_.v_strides[2],
                                   end - begin, params_.head_dim_v, memory_.converted);
    if (common == end) {
      multiply_pv<false>(values, seen, begin == 0);
    } else if (all_finite(values, common - begin, end - begin)) {
      multiply_pv<true>(values, seen, begin == 0);
    } else {
      multiply_pv_by_visibility(values, begin, end, begin == 0);
    }
  }

  void absorb_masked(int64_t begin, int64_t end, bool first) {
    const int64_t count = end - begin;
    Seen all;
    for (int j = 0; j < max_vectors; ++j) all.end[j] = count;
    const Rows keys =
        rows_as_f32<Config::dtype>(view_.k + begin * params_.k_strides[2], params_.k_strides[2],
                                   count, params_.head_dim, memory_.converted);
    SoftmaxState& softmax = memory_.softmax;
    softmax.start_block(lanes_);
    multiply_qk(keys, 0, count, 0, nullptr);
    bool hidden = false;
    for (int j = 0; j < view_.vectors; ++j) {
      const int64_t lane = int64_t{j} * kLanes;
      const MaskView mask{view_.mask, view_.first + lane, view_.queries - lane, begin,
                          view_.causal ? view_.diagonal + lane : end};
      hidden |= add_mask(mask, scores(0, j), lanes_, count, softmax.block_largest + lane);
    }
    softmax.raise(lanes_);
    weigh(0, count, 0);
    const Rows values =
        rows_as_f32<Config::dtype>(view_.v + begin * params_.v_strides[2], params_.v_strides[2],
                                   count, params_.head_dim_v, memory_.converted);
    if (!hidden || all_finite(values, 0, count)) {
      multiply_pv<false>(values, all, first);
    } else {
      multiply_pv_by_visibility(values, begin, end, first);
    }
  }

  bool all_finite(Rows values, int64_t begin, int64_t end) const {
    return cpu::all_finite<AUTOFA_F32>(values[begin], values.stride, end - begin,
                                       params_.head_dim_v);
  }

  // The keys behind `common`, cut where vectors stop seeing: f(first vector that sees, first key,
  // count). The vectors behind the first see all of them.
  template <class F>
  void for_each_stair(int64_t common, const Seen& seen, F&& f) const {
    int64_t first = common;
    for (int j = 0; j < view_.vectors; ++j) {
      if (seen.end[j] > first) {
        f(j, first, seen.end[j] - first);
        first = seen.end[j];
      }
    }
  }

  float* scores(int64_t key, int vector) const {
    return memory_.scores + key * lanes_ + vector * kLanes;
  }

  void multiply_qk(Rows keys, int64_t begin, int64_t end, int vector, float* largest) {
    const int64_t dims = params_.head_dim;
    with_constant<max_vectors>(view_.vectors - vector, [&](auto width) {
      for (int64_t d = 0; d < dims; d += Config::chunk_d) {
        const int64_t chunk = clamp(dims - d, 1, Config::chunk_d);
        const bool last = d + chunk == dims;
        const float* q = memory_.q + d * lanes_ + vector * kLanes;
        for_each_tile<Config::tile_rows(width)>(begin, end, [&](auto height, int64_t key) {
          score_tile<height, width>(keys[key] + d, keys.stride, q, lanes_, chunk, d > 0,
                                    scores(key, vector), last ? largest : nullptr);
        });
      }
    });
  }

  void weigh(int64_t first, int64_t count, int vector) {
    SoftmaxState& softmax = memory_.softmax;
    with_constant<max_vectors>(view_.vectors - vector, [&](auto width) {
      exponentiate<width>(scores(first, vector), lanes_, count, softmax.largest + vector * kLanes,
                          softmax.sum + vector * kLanes);
    });
  }

  // Walking down a column of V defeats the hardware's prefetching. Doing it here gained 12 % at
  // head dim 512 and 0-2 % at 128, and lost 3 % at 64.
  static constexpr int64_t prefetch_from_dims = 128;

  template <bool Stairs>
  void multiply_pv(Rows values, const Seen& seen, bool first) {
    const bool prefetch = params_.head_dim_v >= prefetch_from_dims;
    with_constant<max_vectors>(view_.vectors, [&](auto width) {
      constexpr int tallest = Config::tile_rows(width);
      for_each_tile<tallest>(0, params_.head_dim_v, [&](auto height, int64_t d) {
        constexpr bool may_prefetch = !Stairs && height == tallest;
        const auto tile = may_prefetch && prefetch
                              ? output_tile<height, width, Stairs, may_prefetch, max_vectors>
                              : output_tile<height, width, Stairs, false, max_vectors>;
        tile(values.data + d, values.stride, memory_.scores, lanes_, seen, memory_.softmax.alpha,
             first, memory_.out + d * lanes_);
      });
    });
  }

  // The same, one pair of query and key at a time: a weight of 0 does not hide a NaN or an infinity
  // in V, so hidden pairs must not be multiplied at all.
  void multiply_pv_by_visibility(Rows values, int64_t begin, int64_t end, bool first) {
    for (int64_t i = 0; i < view_.queries; ++i) {
      const int64_t keys =
          view_.causal ? clamp(view_.diagonal + i + 1, begin, end) - begin : end - begin;
      for (int64_t d = 0; d < params_.head_dim_v; ++d) {
        float* to = memory_.out + d * lanes_ + i;
        float sum = first ? 0 : *to * memory_.softmax.alpha[i];
        for (int64_t key = 0; key < keys; ++key) {
          if (view_.mask && view_.mask.hides(view_.first + i, 1, begin + key, 1)) continue;
          sum += memory_.scores[key * lanes_ + i] * values[key][d];
        }
        *to = sum;
      }
    }
  }

  void finish() {
    const SoftmaxState& softmax = memory_.softmax;
    store_output<Config::dtype>(memory_.out, lanes_, softmax.sum, view_.queries, params_.head_dim_v,
                                view_.out, params_.out_strides[2]);
    if (!view_.lse) return;
    const float ln2 = 0.693147180559945309417f;
    for (int64_t i = 0; i < view_.queries; ++i) {
      const float sum = softmax.sum[i];
      view_.lse[i] = sum == 0 ? -INFINITY : softmax.largest[i] * ln2 + logf(sum);
    }
  }

  const autofa_params& params_;
  const PanelView<Type>& view_;
  PanelMemory<Config> memory_;
  const int64_t lanes_;
};

}  // namespace autofa::cpu_flash
