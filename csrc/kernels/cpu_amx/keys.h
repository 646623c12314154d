// Keys and values of all heads in the layouts of the tiles, in memory that the caller lends.
//
// Values are always packed. Keys lie as the tiles want them already, unless the head dim leaves
// part of a chunk open; else only their last, incomplete group is packed.
#pragma once

#include <immintrin.h>
#include <sched.h>
#include <stdint.h>

#include <atomic>

#include "autofa/abi.h"
#include "config.h"
#include "pack.h"
#include "products.h"

namespace autofa::cpu_amx {

class PackedKeys {
 public:
  // Groups that one packing task takes.
  static constexpr int64_t task_groups = 16;

  explicit PackedKeys(const autofa_params& p)
      : params_(p),
        heads_(p.batch * p.heads_kv),
        groups_(squares(seen_by_some(p))),
        key_chunks_(squares(p.head_dim)),
        value_chunks_(squares(p.head_dim_v)),
        in_place_(p.head_dim % kSide == 0 ? smaller(p.seqlen_k / kSide, groups_) : 0),
        tasks_per_head_((groups_ + task_groups - 1) / task_groups) {
    char* at = static_cast<char*>(p.workspace);
    const auto take = [&at](int64_t bytes) {
      char* taken = at;
      if (at) at += (bytes + 63) / 64 * 64;
      return taken;
    };
    values_ = reinterpret_cast<uint16_t*>(take(heads_ * values_size() * 2));
    keys_ = reinterpret_cast<uint16_t*>(take(heads_ * keys_size() * 2));
    special_ = reinterpret_cast<bool*>(take(heads_ * groups_));
    waiting_ = reinterpret_cast<std::atomic<int32_t>*>(take(heads_ * 4));
  }

  int64_t bytes() const {
    const auto rounded = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    return rounded(heads_ * values_size() * 2) + rounded(heads_ * keys_size() * 2) +
           rounded(heads_ * groups_) + rounded(heads_ * 4);
  }

  int64_t tasks() const { return heads_ * tasks_per_head_; }

  void start() const {
    for (int64_t head = 0; head < heads_; ++head) {
      new (&waiting_[head]) std::atomic<int32_t>(static_cast<int32_t>(tasks_per_head_));
    }
  }

  void pack(int64_t task) const {
    const int64_t head = task / tasks_per_head_;
    const int64_t begin = task % tasks_per_head_ * task_groups;
    for (int64_t g = begin; g < smaller(begin + task_groups, groups_); ++g) {
      const int64_t key = g * kSide, count = smaller(params_.seqlen_k - key, kSide);
      const uint16_t* v = source(params_.v, params_.v_strides, head);
      special_[head * groups_ + g] = !pack_values(
          v + key * params_.v_strides[2], params_.v_strides[2], count, params_.head_dim_v,
          values_ + head * values_size() + g * value_chunks_ * kOperandSquare);
      if (g >= in_place_) {
        const uint16_t* k = source(params_.k, params_.k_strides, head);
        pack_keys(k + key * params_.k_strides[2], params_.k_strides[2], count, params_.head_dim,
                  packed_keys(head, g));
      }
    }
    waiting_[head].fetch_sub(1, std::memory_order_release);
  }

  // Returns when a head is packed. Tasks are taken in order, so those that pack it are done or
  // running when this is called.
  void wait(int64_t head) const {
    for (int spins = 0; waiting_[head].load(std::memory_order_acquire) != 0; ++spins) {
      if (spins < 1000) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }

  // Whether some value of the group of the key `begin` is infinite or NaN.
  bool special(int64_t head, int64_t begin) const {
    return special_[head * groups_ + begin / kSide];
  }

  const uint16_t* values(int64_t head, int64_t begin) const {
    return values_ + head * values_size() + begin / kSide * value_chunks_ * kOperandSquare;
  }

  // scores = K Q^T for the group of the key `begin`.
  void score(int64_t head, int64_t begin, const uint16_t* queries, float* scores,
             Products& products) const {
    const int64_t group = begin / kSide, row = params_.k_strides[2];
    if (group < in_place_) {
      const uint16_t* k = source(params_.k, params_.k_strides, head) + begin * row;
      products.add({k, row * 2, 16 * row, 0, kSide, queries, scores, 1, key_chunks_, false});
    } else {
      products.add({packed_keys(head, group), kTileRowBytes, kOperandTile, 0, kOperandSquare,
                    queries, scores, 1, key_chunks_, false});
    }
  }

  // Chunks [chunk, chunk + chunks) of out (+)= V^T weights, for groups as above.
  void combine(int64_t head, int64_t begin, int64_t groups, const uint16_t* weights, bool add,
               int64_t chunk, int64_t chunks, float* out, Products& products) const {
    products.add({values(head, begin) + chunk * kOperandSquare, kTileRowBytes, kOperandTile,
                  kOperandSquare, value_chunks_ * kOperandSquare, weights, out + chunk * kSumSquare,
                  chunks, groups, add});
  }

 private:
  // Keys that some query sees; the others are not packed.
  static int64_t seen_by_some(const autofa_params& p) {
    return p.causal == AUTOFA_CAUSAL_UPPER_LEFT ? smaller(p.seqlen_q, p.seqlen_k) : p.seqlen_k;
  }

  int64_t values_size() const { return groups_ * value_chunks_ * kOperandSquare; }
  int64_t keys_size() const { return (groups_ - in_place_) * key_chunks_ * kOperandSquare; }

  uint16_t* packed_keys(int64_t head, int64_t group) const {
    return keys_ + head * keys_size() + (group - in_place_) * key_chunks_ * kOperandSquare;
  }

  const uint16_t* source(const void* tensor, const int64_t (&strides)[3], int64_t head) const {
    return static_cast<const uint16_t*>(tensor) + head / params_.heads_kv * strides[0] +
           head % params_.heads_kv * strides[1];
  }

  const autofa_params& params_;
  const int64_t heads_, groups_, key_chunks_, value_chunks_;
  const int64_t in_place_;  // leading groups of keys that are used as they lie
  const int64_t tasks_per_head_;
  uint16_t *values_, *keys_;
  bool* special_;
  std::atomic<int32_t>* waiting_;
};

}  // namespace autofa::cpu_amx
