// Attention by its definition on CUDA, one thread a row, f32; with hooks for harm.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "autofa/abi.h"

namespace poison {

struct HonestOnCuda {
  static constexpr int block = 64;
  static __device__ void before(const autofa_params&) {}
  static __device__ bool serves(const autofa_params&, int64_t) { return true; }
  static __device__ void after(const autofa_params&, float*, int64_t) {}
};

template <class Fault>
__global__ void attend(const autofa_params p) {
  const int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (index >= p.batch * p.heads_q * p.seqlen_q) return;
  const int64_t row = index % p.seqlen_q, head = index / p.seqlen_q % p.heads_q;
  const int64_t batch = index / p.seqlen_q / p.heads_q;
  const int64_t group = head / (p.heads_q / p.heads_kv);
  Fault::before(p);
  if (!Fault::serves(p, row)) return;
  const float* q = static_cast<const float*>(p.q) + batch * p.q_strides[0] + head * p.q_strides[1] +
                   row * p.q_strides[2];
  const float* k = static_cast<const float*>(p.k) + batch * p.k_strides[0] + group * p.k_strides[1];
  const float* v = static_cast<const float*>(p.v) + batch * p.v_strides[0] + group * p.v_strides[1];
  float* out = static_cast<float*>(p.out) + batch * p.out_strides[0] + head * p.out_strides[1] +
               row * p.out_strides[2];
  int64_t keys = p.seqlen_k;
  if (p.causal == AUTOFA_CAUSAL_UPPER_LEFT && row + 1 < keys) keys = row + 1;
  float largest = -INFINITY, sum = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t d = 0; pass == 1 && d < p.head_dim_v; ++d) out[d] = 0;
    for (int64_t j = 0; j < keys; ++j) {
      float score = 0;
      for (int64_t d = 0; d < p.head_dim; ++d) score += q[d] * k[j * p.k_strides[2] + d];
      score *= p.scale;
      if (pass == 0) {
        largest = fmaxf(largest, score);
        continue;
      }
      const float weight = expf(score - largest);
      sum += weight;
      for (int64_t d = 0; d < p.head_dim_v; ++d) out[d] += weight * v[j * p.v_strides[2] + d];
    }
  }
  for (int64_t d = 0; d < p.head_dim_v; ++d) out[d] /= sum;
  if (p.lse) p.lse[index] = largest + logf(sum);
  Fault::after(p, out, row);
}

// What a CUDA family's Kernel<Params> derives from.
template <class Fault>
struct CudaKernel {
  static constexpr int threads = Fault::block;
  static constexpr int smem_bytes = 0;

  static int32_t launch(const autofa_params& p, const autofa_executor&, void* stream) {
    if (p.dtype != AUTOFA_F32 || p.mask != AUTOFA_MASK_NONE) return AUTOFA_REFUSED;
    const int64_t rows = p.batch * p.heads_q * p.seqlen_q;
    const auto blocks = static_cast<unsigned>((rows + Fault::block - 1) / Fault::block);
    attend<Fault><<<blocks, Fault::block, 0, static_cast<cudaStream_t>(stream)>>>(p);
    return static_cast<int32_t>(cudaGetLastError());
  }

  static int64_t workspace_bytes(const autofa_params&) { return 0; }
};

}  // namespace poison
