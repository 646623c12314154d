// Online softmax of the two rows that a thread of a warpgroup has, rescaled lazily, in two forms.
//
// The first looks for the largest score of a tile before it takes exponentials. The second takes
// them at once, with the shift that served the tiles before, and finds an overgrown row by the sum
// of its weights, which it needs anyway: then the tile is weighed again, in the first form. That
// saves a comparison for each score, of which an SM makes half as many in a cycle as additions, and
// exponentials need not wait for the tile's last score. It needs the scores afterwards.
#pragma once

#include <cstdint>

#include "autofa/arch/element.cuh"
#include "autofa/arch/wgmma.cuh"
#include "autofa/block/softmax.cuh"

namespace autofa::hopper_split_q {

class RowSoftmax {
 public:
  __device__ __forceinline__ explicit RowSoftmax(float scale_log2) : scale_log2_(scale_log2) {}

  // Makes the shift fit a tile of raw scores (-inf where masked); `owed` is what the output is to
  // be multiplied by.
  template <int Tiles>
  __device__ __forceinline__ void fit(const float (&scores)[Tiles][4], float (&owed)[2]) {
    float top[2];
    bool outgrown = false;
    // Else the compiler keeps all weights of a first try, lest the shift stay as it is.
    compute_here(shift_[0]);
    compute_here(shift_[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = scores[0][2 * half], odd = scores[0][2 * half + 1];
#pragma unroll
      for (int n = 1; n < Tiles; ++n) {
        even = fmaxf(even, scores[n][2 * half]);
        odd = fmaxf(odd, scores[n][2 * half + 1]);
      }
      top[half] = fmaxf(even, odd);
      outgrown |= top[half] > ceiling_[half];
    }
    if (!__any_sync(~0u, outgrown)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2));
      if (top[half] > ceiling_[half]) {
        const bool first = ceiling_[half] == -kInfinity;
        const float shift = top[half] * scale_log2_;
        const float factor = first ? 0.0f : exp2_fast(shift_[half] - shift);
        ceiling_[half] = top[half] + kSlack / scale_log2_;
        shift_[half] = shift;
        sum_[half] *= factor;
        owed[half] *= factor;
      }
    }
  }

  // Of a thread's weights: sums[0] and [1] of its first row, as in the tiles of scores.
  using Sums = float[4];

  // Adds the weight of a score to `sum`, and returns it.
  __device__ __forceinline__ float weigh(float score, int half, float& sum) const {
    const float weight = exp2_fast(fmaf(score, scale_log2_, -shift_[half]));
    sum += weight;
    return weight;
  }

  // Whether weights of a tile that come to `sum`, and the rows before it, say that the shift did
  // not serve: a weight is beyond the slack for sure, or the row has had none yet.
  __device__ __forceinline__ bool unfit(const Sums& sums) const {
    const float most = fmaxf(sums[0] + sums[1], sums[2] + sums[3]);
    return __any_sync(~0u, most > kMostSum || sum_[0] == 0.0f || sum_[1] == 0.0f);
  }

  __device__ __forceinline__ void add(const Sums& sums) {
    sum_[0] += sums[0] + sums[1];
    sum_[1] += sums[2] + sums[3];
  }

  // After the last tile: completes the row sums over the four lanes that share a row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum_[half] += __shfl_xor_sync(~0u, sum_[half], 1);
      sum_[half] += __shfl_xor_sync(~0u, sum_[half], 2);
    }
  }

  // What the row's accumulated output is multiplied by; 0 for a row that saw no key.
  __device__ __forceinline__ float normalizer(int half) const {
    return sum_[half] == 0.0f ? 0.0f : 1.0f / sum_[half];
  }

  // Natural log of the row's sum of exponentials; -inf for a row that saw no key.
  __device__ __forceinline__ float log_sum(int, int half) const {
    return (shift_[half] + log2f(sum_[half])) * 0.6931471805599453f;
  }

  __device__ __forceinline__ float sum(int half) const { return sum_[half]; }

 private:
  // log2 of what a weight may come to before the shift follows. Of what a thread's weights of one
  // tile may come to the second form tells: more than all of them, at most 48, within the slack.
  static constexpr float kSlack = 8.0f, kMostSum = 16384.0f;

  float scale_log2_;
  float ceiling_[2] = {-kInfinity, -kInfinity};  // raw score up to which `shift_` serves
  float shift_[2] = {};                          // log2 of what the row's weights are divided by
  float sum_[2] = {};                            // of this lane's weights
};

}  // namespace autofa::hopper_split_q
