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
    float query[Passes][8], words[8], sums[8] = {};
    load_query(query, row);
#pragma unroll 1
    for (int key = 0; key < visible; ++key) {
      const float weight = exp2_fast((score(query, key) - log_sum) * kLog2e);
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

  // The log of a row's sum of exponentials, for callers that have not kept it.
  __device__ __forceinline__ float log_sum(int row, int visible) const {
    float query[Passes][8], top = -kInfinity, sum = 0.0f;
    load_query(query, row);
#pragma unroll 1
    for (int key = 0; key < visible; ++key) {
      const float next = score(query, key);
      if (next > top) {
        sum *= exp2_fast((top - next) * kLog2e);
        top = next;
      }
      sum += exp2_fast((next - top) * kLog2e);
    }
    return top + log2f(sum) / kLog2e;
  }

  // Whether the row holds an infinity or a NaN, as it was stored.
  __device__ __forceinline__ bool stored_nonfinite(int row) const {
    return any_nonfinite(load(out_, call_.out_strides[2], row, first_column_, end_column_));
  }

 private:
  static constexpr float kLog2e = 1.4426950408889634f;

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

  __device__ __forceinline__ void load_query(float (&query)[Passes][8], int row) const {
#pragma unroll
    for (int pass = 0; pass < Passes; ++pass) {
      unpack(query[pass], load(q_, call_.q_strides[2], row, pass * 256, call_.head_dim));
    }
  }

  __device__ __forceinline__ float score(const float (&query)[Passes][8], int key) const {
    float words[8], sum = 0.0f;
#pragma unroll
    for (int pass = 0; pass < Passes; ++pass) {
      unpack(words, load(k_, call_.k_strides[2], key, pass * 256, call_.head_dim));
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(query[pass][i], words[i], sum);
    }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    return sum * call_.scale;
  }

  static __device__ __forceinline__ bool any_nonfinite(uint4 words) {
    const uint32_t found = nonfinite_bits<Element>(words.x) | nonfinite_bits<Element>(words.y) |
                           nonfinite_bits<Element>(words.z) | nonfinite_bits<Element>(words.w);
    return __any_sync(~0u, found != 0);
  }

  __device__ __forceinline__ bool any_hidden(int visible, int end) const {
    bool found = false;
#pragma unroll 1
    for (int key = visible; key < end; ++key) {
      found |= any_nonfinite(load(v_, call_.v_strides[2], key, first_column_, end_column_));
    }
    return found;
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
  // Both before any repair, which then does not need the registers of the output.
  const uint32_t lanes[2] = {__ballot_sync(~0u, has_nonfinite(out, 0)),
                             __ballot_sync(~0u, has_nonfinite(out, 1))};
  if ((lanes[0] | lanes[1]) == 0) return;
  __syncwarp();  // the stores of all lanes come before those of the repair
  const float log_sums[2] = {softmax.log_sum(0, 0), softmax.log_sum(0, 1)};
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    const int row = first_row + i;
    const float of_row = __shfl_sync(~0u, i < 8 ? log_sums[0] : log_sums[1], i % 8 * 4);
    if (((i < 8 ? lanes[0] : lanes[1]) >> i % 8 * 4 & 15u) == 0 || row >= row_count) continue;
    repairer.repair(row, limit(row), end, of_row);
  }
}

}  // namespace autofa
