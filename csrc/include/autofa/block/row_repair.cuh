// Rows that an infinity or a NaN reached through a value hidden from them, computed again.
//
// The product p v takes in whole tiles, and the weight 0 of a hidden value times a NaN is a NaN.
// Kernels whose values only wgmma reads cannot clear it from the tile, which others see rightly; it
// is found in the output instead, which costs next to nothing, and repaired there, which is slow
// but rare: a row has at most one tile's hidden values.
#pragma once

#include <cstdint>

#include "autofa/abi.h"
#include "autofa/arch/element.cuh"
#include "autofa/block/nonfinite.cuh"
#include "autofa/block/scheduler.cuh"
#include "autofa/block/softmax.cuh"

namespace autofa {

// Whether the thread's part of a row holds an infinity or a NaN.
template <int Tiles>
__device__ __forceinline__ bool has_nonfinite(const float (&out)[Tiles][4], int half) {
  float probe = 0.0f;
#pragma unroll
  for (int n = 0; n < Tiles; ++n) {
    probe = fmaf(out[n][2 * half], 0.0f, probe);
    probe = fmaf(out[n][2 * half + 1], 0.0f, probe);
  }
  return probe != 0.0f;  // a NaN is not
}

// The columns [first_column, end_column) of one head of a call's output, by a warp: lane l has
// columns 8 l to 8 l + 7 of each 256. Those of the output are 256 at most, those of queries and
// keys 256 * Passes.
template <class Element, int Passes = 1>
class RowRepair {
 public:
  __device__ __forceinline__ RowRepair(const autofa_params& call, int batch, int head_q,
                                       int head_kv)
      : RowRepair(call, batch, head_q, head_kv, 0, static_cast<int>(call.head_dim_v)) {}
  __device__ __forceinline__ RowRepair(const autofa_params& call, int batch, int head_q,
                                       int head_kv, int first_column, int end_column)
      : call_(call),
        first_column_(first_column),
        end_column_(end_column),
        q_(matrix_at(call.q, call.q_strides, batch, head_q)),
        k_(matrix_at(call.k, call.k_strides, batch, head_kv)),
        v_(matrix_at(call.v, call.v_strides, batch, head_kv)),
        out_(matrix_at(call.out, call.out_strides, batch, head_q)) {}

  // Writes the output of a row that sees the keys below `visible`, if one of the values from there
  // to `end` is not finite. `log_sum` is the row's natural log of the sum of exponentials.
  __device__ __forceinline__ void repair(int row, int visible, int end, float log_sum) const {
    // A NaN there is of the row itself. No key at all has -inf, and zeros are its output.
    if (!(log_sum < kInfinity) || !any_hidden(visible, end)) return;
    constexpr float kLog2e = 1.4426950408889634f;
    float query[Passes][8], sums[8] = {};
#pragma unroll
    for (int pass = 0; pass < Passes; ++pass) {
      unpack(query[pass], load(q_, call_.q_strides[2], row, pass * 256, call_.head_dim));
    }
#pragma unroll 1
    for (int key = 0; key < visible; ++key) {
      float words[8], score = 0.0f;
#pragma unroll
      for (int pass = 0; pass < Passes; ++pass) {
        unpack(words, load(k_, call_.k_strides[2], key, pass * 256, call_.head_dim));
#pragma unroll
        for (int i = 0; i < 8; ++i) score = fmaf(query[pass][i], words[i], score);
      }
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) score += __shfl_xor_sync(~0u, score, bit);
      const float weight = exp2_fast((score * call_.scale - log_sum) * kLog2e);
      unpack(words, load(v_, call_.v_strides[2], key, first_column_, end_column_));
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] = fmaf(weight, words[i], sums[i]);
    }
    if (first_column_ + column() < end_column_) {
      char* target = static_cast<char*>(out_) + row * call_.out_strides[2] * 2;
      *reinterpret_cast<uint4*>(target + (first_column_ + column()) * 2) =
          make_uint4(Element::pack(sums[0], sums[1]), Element::pack(sums[2], sums[3]),
                     Element::pack(sums[4], sums[5]), Element::pack(sums[6], sums[7]));
    }
  }

 private:
  static __device__ __forceinline__ int column() { return static_cast<int>(threadIdx.x) % 32 * 8; }

  // The lane's columns of those of a row from `first` on; zeros from `end` on.
  static __device__ __forceinline__ uint4 load(const void* matrix, int64_t stride, int row,
                                               int first, int64_t end) {
    if (first + column() >= end) return make_uint4(0, 0, 0, 0);
    const char* start = static_cast<const char*>(matrix) + row * stride * 2;
    return *reinterpret_cast<const uint4*>(start + (first + column()) * 2);
  }

  static __device__ __forceinline__ void unpack(float (&values)[8], uint4 words) {
    const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = Element::unpack(static_cast<uint16_t>(all[i / 2] >> i % 2 * 16));
    }
  }

  __device__ __forceinline__ bool any_hidden(int visible, int end) const {
    uint32_t found = 0;
#pragma unroll 1
    for (int key = visible; key < end; ++key) {
      const uint4 words = load(v_, call_.v_strides[2], key, first_column_, end_column_);
      found |= nonfinite_bits<Element>(words.x) | nonfinite_bits<Element>(words.y) |
               nonfinite_bits<Element>(words.z) | nonfinite_bits<Element>(words.w);
    }
    return __any_sync(~0u, found != 0);
  }

  const autofa_params& call_;
  const int first_column_, end_column_;
  const void *q_, *k_, *v_;
  void* out_;
};

// Repairs the warp's rows row(half) = first_row + half * 8 + lane / 4 after their output was
// stored. `limit` says which keys a row sees; the tiles that were taken in end at key `end`.
template <class Repair, class Softmax, class Limit, int Tiles>
__device__ __forceinline__ void repair_rows(const Repair& repairer, const float (&out)[Tiles][4],
                                            const Softmax& softmax, const Limit& limit,
                                            int first_row, int row_count, int end) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t lanes = __ballot_sync(~0u, has_nonfinite(out, half));
    if (lanes == 0) continue;
    __syncwarp();  // the stores of all lanes come before those of the repair
    const float log_sum = softmax.log_sum(0, half);
#pragma unroll 1
    for (int quad = 0; quad < 8; ++quad) {
      const int row = first_row + half * 8 + quad;
      const float of_row = __shfl_sync(~0u, log_sum, quad * 4);
      if ((lanes >> quad * 4 & 15u) == 0 || row >= row_count) continue;
      repairer.repair(row, limit(row), end, of_row);
    }
  }
}

}  // namespace autofa
