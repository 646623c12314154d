// Attention of a few query rows over one split of the keys, left as a partial result.
#pragma once

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <optional>

#include "autofa/abi.h"
#include "autofa/cpu/finite.h"
#include "autofa/cpu/mask.h"
#include "autofa/cpu/scratch.h"
#include "config.h"
#include "tiles.h"

namespace autofa::cpu_decode {

// What a split leaves of each row: the largest score in units of log 2, the sum of the weights
// relative to it, and the output before division by that sum.
struct Partial {
  float *largest, *sum, *out;

  static int64_t floats(int64_t rows, int64_t out_stride) {
    return round_up(rows * (out_stride + 2), kLanes);
  }

  static Partial at(float* memory, int64_t rows, int64_t out_stride) {
    return {memory + rows * out_stride, memory + rows * (out_stride + 1), memory};
  }
};

// The rows of one task: query `first + i` is row (first + i) % seqlen_q of query head
// (first + i) / seqlen_q of those that share the key head.
struct RowRange {
  int64_t batch, kv_head, first, count;

  int64_t head(const autofa_params& p, int64_t i) const {
    return kv_head * (p.heads_q / p.heads_kv) + (first + i) / p.seqlen_q;
  }
  int64_t query(const autofa_params& p, int64_t i) const { return (first + i) % p.seqlen_q; }
};

// How many keys a query sees, explicit masks aside.
inline int64_t keys_seen(const autofa_params& p, int64_t query) {
  if (p.causal == AUTOFA_CAUSAL_NONE) return p.seqlen_k;
  const int64_t shift = p.causal == AUTOFA_CAUSAL_LOWER_RIGHT ? p.seqlen_k - p.seqlen_q : 0;
  const int64_t seen = query + 1 + shift;
  return seen < 0 ? 0 : seen < p.seqlen_k ? seen : p.seqlen_k;
}

// The working memory of one thread.
struct Memory {
  float *q, *scores, *alpha;
  int64_t q_stride, scores_stride;

  // Nothing if memory is short.
  template <class Config>
  static std::optional<Memory> allocate(int64_t rows, int64_t dims) {
    Memory memory;
    memory.q_stride = round_up(dims, kLanes);
    memory.scores_stride = Config::block_k + kLanes;
    const int64_t per_row = memory.q_stride + memory.scores_stride + 1;
    const size_t bytes = static_cast<size_t>(rows) * per_row * sizeof(float);
    memory.q = static_cast<float*>(cpu::thread_scratch(bytes));
    if (!memory.q) return std::nullopt;
    memory.scores = memory.q + rows * memory.q_stride;
    memory.alpha = memory.scores + rows * memory.scores_stride;
    return memory;
  }
};

template <class Config>
class Split {
  using Type = typename Config::Type;

 public:
  Split(const autofa_params& params, const RowRange& rows, const Memory& memory, Partial to,
        int64_t out_stride)
      : p_(params), rows_(rows), memory_(memory), to_(to), out_stride_(out_stride) {}

  // Keys [begin, end) into the partial result.
  void run(int64_t begin, int64_t end) {
    const int64_t padded = end_of_tiles<Config::tile_rows>(rows_.count);
    load_queries();
    const auto clear = [](float* row, int64_t count) { memset(row, 0, count * sizeof *row); };
    clear(memory_.q + rows_.count * memory_.q_stride, (padded - rows_.count) * memory_.q_stride);
    clear(memory_.alpha, padded);
    clear(to_.out, padded * out_stride_);
    clear(to_.sum, rows_.count);
    for (int64_t i = 0; i < rows_.count; ++i) to_.largest[i] = -FLT_MAX;
    for (int64_t key = begin; key < end; key += Config::block_k) {
      const int64_t count = end - key < Config::block_k ? end - key : Config::block_k;
      if (!hidden_from_all(key, count)) absorb(key, count);
    }
  }

 private:
  void load_queries() {
    const float factor = p_.scale * 1.44269504088896340736f;
    for (int64_t i = 0; i < rows_.count; ++i) {
      const Type* from = static_cast<const Type*>(p_.q) + rows_.batch * p_.q_strides[0] +
                         rows_.head(p_, i) * p_.q_strides[1] + rows_.query(p_, i) * p_.q_strides[2];
      float* to = memory_.q + i * memory_.q_stride;
      int64_t d = 0;
      for (; d + kLanes <= p_.head_dim; d += kLanes) {
        cpu::store(to + d, Config::Element::load(from + d) * factor);
      }
      if (d < p_.head_dim) {
        const Floats rest = cpu::load_part<Config::dtype>(from + d, p_.head_dim - d);
        cpu::store(to + d, rest * factor);
      }
    }
  }

  cpu::HeadMask mask_of(int64_t i) const {
    return cpu::HeadMask(p_, rows_.batch, rows_.head(p_, i));
  }

  bool hidden_from_all(int64_t key, int64_t count) const {
    if (p_.mask == AUTOFA_MASK_NONE) return false;
    for (int64_t i = 0; i < rows_.count; ++i) {
      if (!mask_of(i).hides(rows_.query(p_, i), 1, key, count)) return false;
    }
    return true;
  }

  void absorb(int64_t key, int64_t count) {
    const Type* k = static_cast<const Type*>(p_.k) + rows_.batch * p_.k_strides[0] +
                    rows_.kv_head * p_.k_strides[1] + key * p_.k_strides[2];
    for_fewest_tiles<Config::tile_rows>(0, rows_.count, [&](auto height, int64_t i) {
      score_block<Config, height>(memory_.q + i * memory_.q_stride, memory_.q_stride, k,
                                  p_.k_strides[2], p_.head_dim, count, scores(i),
                                  memory_.scores_stride);
    });
    bool hidden = false;
    for (int64_t i = 0; i < rows_.count; ++i) hidden |= weigh(i, key, count);
    const Type* v = static_cast<const Type*>(p_.v) + rows_.batch * p_.v_strides[0] +
                    rows_.kv_head * p_.v_strides[1] + key * p_.v_strides[2];
    if (!hidden || cpu::all_finite<Config::dtype>(v, p_.v_strides[2], count, p_.head_dim_v)) {
      for_fewest_tiles<Config::tile_rows>(
          0, rows_.count, [&](auto height, int64_t i) { multiply<height>(i, v, count); });
    } else {
      multiply_by_visibility(v, key, count);
    }
  }

  float* scores(int64_t i) const { return memory_.scores + i * memory_.scores_stride; }

  // Hides what row i does not see of a block, and turns its scores into weights; whether anything
  // is hidden. A hidden score is replaced, so that a NaN in it never counts.
  bool weigh(int64_t i, int64_t key, int64_t count) {
    float* const row = scores(i);
    const int64_t query = rows_.query(p_, i);
    const int64_t seen = keys_seen(p_, query) - key;
    const int64_t padded = round_up(count, kLanes);
    const cpu::HeadMask mask = mask_of(i);
    Floats top = cpu::broadcast(-FLT_MAX);
    cpu::Ints hidden = {};
    for (int64_t j = 0; j < padded; j += kLanes) {
      Floats score = cpu::load_unaligned(row + j);
      if (mask || seen < j + kLanes || count < j + kLanes) {
        const Floats bias = mask ? mask.load_row(query, key + j, count - j) : Floats{};
        const int64_t visible = seen - j, width = count - j;
        const auto gone = (bias == -INFINITY) | (cpu::lane_numbers() >= lanes_below(visible));
        const auto outside = cpu::lane_numbers() >= lanes_below(width);
        hidden |= gone & ~outside;
        score = (gone | outside) ? cpu::broadcast(-INFINITY) : score + bias;
        cpu::store_unaligned(row + j, score);
      }
      top = cpu::max(top, score);
    }
    const float before = to_.largest[i], block = cpu::largest_lane(top);
    const float now = block > before ? block : before;
    Floats total = {};
    for (int64_t j = 0; j < padded; j += kLanes) {
      const Floats weight = cpu::exp2_nonpositive(cpu::load_unaligned(row + j) - now);
      total += weight;
      cpu::store_unaligned(row + j, weight);
    }
    const float alpha = cpu::exp2_nonpositive(cpu::broadcast(before - now))[0];
    to_.largest[i] = now;
    to_.sum[i] = to_.sum[i] * alpha + cpu::sum_of_lanes(total);
    memory_.alpha[i] = alpha;
    return cpu::any(hidden);
  }

  static int32_t lanes_below(int64_t count) {
    return static_cast<int32_t>(count < 0 ? 0 : count < kLanes ? count : kLanes);
  }

  template <int Rows>
  void multiply(int64_t i, const Type* v, int64_t count) {
    const int64_t whole = p_.head_dim_v / kLanes, rest = p_.head_dim_v % kLanes;
    const int64_t ahead = Config::rows_ahead(p_.head_dim_v);
    const auto block = [&](auto vectors, int64_t d, int64_t width) {
      output_block<Config, Rows, vectors>(scores(i), memory_.scores_stride, v + d, p_.v_strides[2],
                                          width, ahead, count, memory_.alpha + i,
                                          to_.out + i * out_stride_ + d, out_stride_);
    };
    for_each_tile<Config::tile_dims(Rows)>(
        0, whole, [&](auto vectors, int64_t at) { block(vectors, at * kLanes, kLanes); });
    if (rest) block(Constant<1>(), whole * kLanes, rest);
  }

  // The same, one pair of row and key at a time: hidden pairs must not be multiplied at all.
  void multiply_by_visibility(const Type* v, int64_t key, int64_t count) {
    for (int64_t i = 0; i < rows_.count; ++i) {
      const int64_t query = rows_.query(p_, i), seen = keys_seen(p_, query) - key;
      const cpu::HeadMask mask = mask_of(i);
      float* const out = to_.out + i * out_stride_;
      for (int64_t d = 0; d < out_stride_; ++d) out[d] *= memory_.alpha[i];
      for (int64_t j = 0; j < count && j < seen; ++j) {
        if (mask && mask.hides(query, 1, key + j, 1)) continue;
        for (int64_t d = 0; d < p_.head_dim_v; d += kLanes) {
          const int64_t width = p_.head_dim_v - d;
          const Type* from = v + j * p_.v_strides[2] + d;
          const Floats value = width < kLanes ? cpu::load_part<Config::dtype>(from, width)
                                              : Config::Element::load(from);
          cpu::store(out + d, cpu::load(out + d) + value * scores(i)[j]);
        }
      }
    }
  }

  const autofa_params& p_;
  const RowRange& rows_;
  const Memory& memory_;
  const Partial to_;
  const int64_t out_stride_;
};

}  // namespace autofa::cpu_decode
