// Attention by its definition, one thread, f32; with a hook where each poison does its harm.
#pragma once

#include <math.h>
#include <stdint.h>

#include <vector>

#include "autofa/abi.h"

namespace poison {

// A fault derives from this and hides what it does differently.
struct Honest {
  static void before(const autofa_params&) {}
  static int64_t last_key(int64_t visible, const autofa_params&) { return visible; }
  static bool sees_mask() { return true; }
  static float written(float value) { return value; }
  static void after(const autofa_params&) {}
};

inline int64_t visible_keys(const autofa_params& p, int64_t row) {
  int64_t last = p.seqlen_k;
  if (p.causal == AUTOFA_CAUSAL_UPPER_LEFT) last = row + 1;
  if (p.causal == AUTOFA_CAUSAL_LOWER_RIGHT) last = row + 1 + p.seqlen_k - p.seqlen_q;
  return last < 0 ? 0 : last < p.seqlen_k ? last : p.seqlen_k;
}

template <class Fault>
void attend_row(const autofa_params& p, int64_t batch, int64_t head, int64_t row,
                std::vector<float>& weights) {
  const int64_t group = head / (p.heads_q / p.heads_kv);
  const float* q = static_cast<const float*>(p.q) + batch * p.q_strides[0] + head * p.q_strides[1] +
                   row * p.q_strides[2];
  const float* k = static_cast<const float*>(p.k) + batch * p.k_strides[0] + group * p.k_strides[1];
  const float* v = static_cast<const float*>(p.v) + batch * p.v_strides[0] + group * p.v_strides[1];
  float* out = static_cast<float*>(p.out) + batch * p.out_strides[0] + head * p.out_strides[1] +
               row * p.out_strides[2];

  const int64_t visible = Fault::sees_mask() ? visible_keys(p, row) : p.seqlen_k;
  const int64_t keys = Fault::last_key(visible, p);
  float largest = -INFINITY;
  for (int64_t j = 0; j < keys; ++j) {
    float score = 0;
    for (int64_t d = 0; d < p.head_dim; ++d) score += q[d] * k[j * p.k_strides[2] + d];
    weights[j] = score * p.scale;
    largest = fmaxf(largest, weights[j]);
  }
  float sum = 0;
  for (int64_t j = 0; j < keys; ++j) sum += weights[j] = expf(weights[j] - largest);
  for (int64_t d = 0; d < p.head_dim_v; ++d) {
    float value = 0;
    for (int64_t j = 0; j < keys; ++j) value += weights[j] * v[j * p.v_strides[2] + d];
    out[d] = Fault::written(keys == 0 ? 0 : value / sum);
  }
  if (p.lse) p.lse[(batch * p.heads_q + head) * p.seqlen_q + row] = largest + logf(sum);
}

// What a family's Kernel<Params> derives from.
template <class Fault>
struct Kernel {
  static constexpr int threads = 0;
  static constexpr int smem_bytes = 0;

  static int32_t launch(const autofa_params& p, const autofa_executor&, void*) {
    if (p.dtype != AUTOFA_F32 || p.mask != AUTOFA_MASK_NONE) return AUTOFA_REFUSED;
    Fault::before(p);
    std::vector<float> weights(p.seqlen_k);
    for (int64_t batch = 0; batch < p.batch; ++batch) {
      for (int64_t head = 0; head < p.heads_q; ++head) {
        for (int64_t row = 0; row < p.seqlen_q; ++row) {
          attend_row<Fault>(p, batch, head, row, weights);
        }
      }
    }
    Fault::after(p);
    return AUTOFA_OK;
  }

  static int64_t workspace_bytes(const autofa_params&) { return 0; }
};

}  // namespace poison
