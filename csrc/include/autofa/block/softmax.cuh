// Online softmax on accumulator fragments (Milakov and Gimelshein 2018; Dao 2023), rescaled lazily.
//
// Any shift of the exponent gives the same result as long as nothing overflows, so the shift
// follows the running maximum only when a row outgrows it by 2^8 (the threshold of
// FlashAttention-4). After the first tile almost no tile pays for the quad reductions and for
// rescaling the output.
#pragma once

#include <cstdint>

#include "autofa/arch/element.cuh"

namespace autofa {

constexpr float kInfinity = __builtin_huge_valf();

// The scale as the softmax wants it: positive. A negative one is applied by negating the queries.
// Zero becomes the smallest normal number, which gives the same equal weights, and keeps the
// product with the -inf of a masked score from being NaN.
struct SoftmaxScale {
  float log2 = 1.0f;  // scale * log2(e); as it is for scores that are scaled already
  bool negate_queries = false;

  SoftmaxScale() = default;
  __device__ __forceinline__ explicit SoftmaxScale(float scale) : negate_queries(scale < 0.0f) {
    constexpr float kSmallest = 1.17549435e-38f, kLargest = 3.40282347e+38f;
    log2 = fabsf(scale) * 1.4426950408889634f;
    if (log2 < kSmallest) log2 = kSmallest;  // written so that a NaN stays one
    if (log2 > kLargest) log2 = kLargest;
  }
};

// Calls f(m, half): a thread's rows are row(m, half) = m * 16 + half * 8 + lane / 4.
template <int MTiles, class Function>
__device__ __forceinline__ void for_each_row(Function f) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) f(m, half);
  }
}

template <int MTiles>
class OnlineSoftmax {
 public:
  // Weights come to at most 2^slack_log2. Where they are summed up in 16 bits, that is 0.
  __device__ __forceinline__ explicit OnlineSoftmax(float scale_log2, float slack_log2 = 8.0f)
      : scale_log2_(scale_log2), slack_log2_(slack_log2) {
    for_each_row<MTiles>([&](int m, int half) {
      ceiling_[m][half] = -kInfinity;
      shift_[m][half] = 0.0f;
      sum_[m][half] = 0.0f;
    });
  }

  // Makes the shift fit a tile of raw scores (-inf where masked), and rescales `out` if it must.
  template <int NTiles, int OTiles>
  __device__ __forceinline__ void fit(float (&scores)[MTiles][NTiles][4],
                                      float (&out)[MTiles][OTiles][4]) {
    float top[MTiles][2];
    if (__any_sync(~0u, outgrown(top, scores))) raise(top, out);
  }

  // The two steps of fit(), for warps that share rows and must raise them together. First: the
  // largest of this lane's scores per row, and whether the shift no longer serves one of them.
  template <int NTiles>
  __device__ __forceinline__ bool outgrown(float (&top)[MTiles][2],
                                           const float (&scores)[MTiles][NTiles][4]) const {
    bool any = false;
    for_each_row<MTiles>([&](int m, int half) {
      float even = scores[m][0][2 * half], odd = scores[m][0][2 * half + 1];
#pragma unroll
      for (int n = 1; n < NTiles; ++n) {
        even = fmaxf(even, scores[m][n][2 * half]);
        odd = fmaxf(odd, scores[m][n][2 * half + 1]);
      }
      top[m][half] = fmaxf(even, odd);
      any |= top[m][half] > ceiling_[m][half];
    });
    return any;
  }

  // Second: follows the rows' maxima, over the lanes that share a row, where they outgrew.
  template <int OTiles>
  __device__ __forceinline__ void raise(const float (&top)[MTiles][2],
                                        float (&out)[MTiles][OTiles][4]) {
    const float slack = slack_log2_ / scale_log2_;
    for_each_row<MTiles>([&](int m, int half) {
      const float row_top = over_row(top[m][half]);
      if (row_top > ceiling_[m][half]) {
        const bool first = ceiling_[m][half] == -kInfinity;
        const float shift = row_top * scale_log2_;
        const float factor = first ? 0.0f : exp2_fast(shift_[m][half] - shift);
        ceiling_[m][half] = row_top + slack;
        shift_[m][half] = shift;
        sum_[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < OTiles; ++n) {
          out[m][n][2 * half] *= factor;
          out[m][n][2 * half + 1] *= factor;
        }
      }
    });
  }

  // The maximum over the four lanes that share a row.
  static __device__ __forceinline__ float over_row(float top) {
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    return fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  }

  // Turns the scores of 16 keys of a fitted tile, those of columns 2 * square and 2 * square + 1,
  // into weights.
  template <int NTiles>
  __device__ __forceinline__ void weigh(float (&scores)[MTiles][NTiles][4], int square) {
    for_each_row<MTiles>([&](int m, int half) {
      float sum = 0.0f;
#pragma unroll
      for (int n = 2 * square; n < 2 * square + 2; ++n) {
        float& low = scores[m][n][2 * half];
        float& high = scores[m][n][2 * half + 1];
        low = exp2_fast(fmaf(low, scale_log2_, -shift_[m][half]));
        high = exp2_fast(fmaf(high, scale_log2_, -shift_[m][half]));
        sum += low + high;
      }
      sum_[m][half] += sum;
    });
  }

  // After the last tile: completes the row sums over the four lanes that share a row.
  __device__ __forceinline__ void finish() {
    for_each_row<MTiles>([&](int m, int half) {
      sum_[m][half] += __shfl_xor_sync(~0u, sum_[m][half], 1);
      sum_[m][half] += __shfl_xor_sync(~0u, sum_[m][half], 2);
    });
  }

  // A row's sum of weights: of this lane before finish(), of the warp after it.
  __device__ __forceinline__ float& sum(int m, int half) { return sum_[m][half]; }

  // What the row's accumulated output is multiplied by; 0 for a row that saw no key.
  __device__ __forceinline__ float normalizer(int m, int half) const {
    return sum_[m][half] == 0.0f ? 0.0f : 1.0f / sum_[m][half];
  }

  // Natural log of the row's sum of exponentials; -inf for a row that saw no key.
  __device__ __forceinline__ float log_sum(int m, int half) const {
    return (shift_[m][half] + log2f(sum_[m][half])) * 0.6931471805599453f;
  }

 private:
  float scale_log2_, slack_log2_;
  float ceiling_[MTiles][2];  // raw score up to which `shift_` serves; -inf before the first key
  float shift_[MTiles][2];    // log2 of what the row's weights are divided by
  float sum_[MTiles][2];      // of this lane's weights
};

}  // namespace autofa
