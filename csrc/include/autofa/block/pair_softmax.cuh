// Online softmax of rows whose keys are split over two thread blocks, each of which also
// accumulates its part of the output over the keys of both.
//
// A block exponentiates by a shift of its own and sends it along with the weights; both then go on
// with the larger of the two shifts. Shifts are whole numbers, in log2: so weights that are rounded
// to 16 bits already can still be multiplied by the difference, which is a power of two, without
// another rounding. As a shift is raised only once the row outgrows it by 2^6, it almost never is.
#pragma once

#include <cstdint>

#include "autofa/arch/element.cuh"
#include "autofa/block/softmax.cuh"

namespace autofa {

// Of the two rows lane / 4 and lane / 4 + 8 of each thread.
class PairSoftmax {
 public:
  // Finite: from a shift of -inf, the weight of a hidden key would be exp(-inf + inf).
  static constexpr float kNoShift = -3.40282347e+38f;

  // What is to be multiplied by which power of two.
  struct Factors {
    float out[2], own[2], peer[2];
  };

  __device__ __forceinline__ explicit PairSoftmax(float scale_log2) : scale_log2_(scale_log2) {}

  // Chooses the shift for this block's scores (-inf where masked) of a step.
  template <int Tiles>
  __device__ __forceinline__ void fit(const float (&scores)[1][Tiles][4]) {
    constexpr float slack = 6.0f;
    float top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = scores[0][0][2 * half], odd = scores[0][0][2 * half + 1];
#pragma unroll
      for (int n = 1; n < Tiles; ++n) {
        even = fmaxf(even, scores[0][n][2 * half]);
        odd = fmaxf(odd, scores[0][n][2 * half + 1]);
      }
      top[half] = fmaxf(even, odd) * scale_log2_;
    }
    if (__any_sync(~0u, top[0] > own_[0] + slack || top[1] > own_[1] + slack)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float of_row = OnlineSoftmax<1>::over_row(top[half]);
        if (of_row > own_[half] + slack) {
          const float raised = ceilf(of_row);
          sum_[half] *= exp2_fast(own_[half] - raised);
          own_[half] = raised;
        }
      }
    }
  }

  // Turns the scores of 16 keys, those of columns 2 * square and 2 * square + 1, into weights.
  template <int Tiles>
  __device__ __forceinline__ void weigh(float (&scores)[1][Tiles][4], int square) {
#pragma unroll
    for (int n = 2 * square; n < 2 * square + 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[0][n][i];
        score = exp2_fast(fmaf(score, scale_log2_, -own_[i / 2]));
        sum_[i / 2] += score;
      }
    }
  }

  // The shift of this block's latest weights.
  __device__ __forceinline__ float own_shift(int half) const { return own_[half]; }

  // Goes on with the larger of this block's shifts and those of the other. False if all factors
  // are 1.
  __device__ __forceinline__ bool join(const float (&peer)[2], Factors& factors) {
    const float larger[2] = {fmaxf(peer[0], own_[0]), fmaxf(peer[1], own_[1])};
    // Shifts never fall: what equals the old ones on neither side has been raised.
    const bool raised = __any_sync(~0u, larger[0] != shift_[0] || larger[1] != shift_[1]);
    if (raised) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factors.out[half] = exp2_fast(shift_[half] - larger[half]);
        factors.own[half] = exp2_fast(own_[half] - larger[half]);
        factors.peer[half] = exp2_fast(peer[half] - larger[half]);
        sum_[half] *= factors.own[half];
        shift_[half] = own_[half] = larger[half];
      }
    }
    return raised;
  }

  // The same where this block's weights and those of others were sent before the shift was last
  // raised: `used` is this block's shift of them, `low` and `top` the least and the largest of all
  // other blocks. Factors of the others are up to the caller, who has their shifts.
  __device__ __forceinline__ bool join_late(const float (&low)[2], const float (&top)[2],
                                            const float (&used)[2], Factors& factors) {
    float larger[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      larger[half] = fmaxf(fmaxf(top[half], used[half]), shift_[half]);
    }
    const bool raised =
        __any_sync(~0u, fminf(low[0], used[0]) != larger[0] || shift_[0] != larger[0] ||
                            fminf(low[1], used[1]) != larger[1] || shift_[1] != larger[1]);
    if (raised) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factors.out[half] = exp2_fast(shift_[half] - larger[half]);
        factors.own[half] = exp2_fast(used[half] - larger[half]);
        shift_[half] = larger[half];
        const float next = fmaxf(own_[half], larger[half]);
        sum_[half] *= exp2_fast(own_[half] - next);
        own_[half] = next;
      }
    }
    return raised;
  }
  __device__ __forceinline__ float shift(int half) const { return shift_[half]; }

  // After the last step: this block's sums, completed over the four lanes that share a row.
  __device__ __forceinline__ float finish(int half) {
    sum_[half] += __shfl_xor_sync(~0u, sum_[half], 1);
    sum_[half] += __shfl_xor_sync(~0u, sum_[half], 2);
    return sum_[half];
  }
  // And those of the other block.
  __device__ __forceinline__ void add(int half, float of_peer) { sum_[half] += of_peer; }

  // As those of OnlineSoftmax.
  __device__ __forceinline__ float normalizer(int, int half) const {
    return sum_[half] == 0.0f ? 0.0f : 1.0f / sum_[half];
  }
  __device__ __forceinline__ float log_sum(int, int half) const {
    return (shift_[half] + log2f(sum_[half])) * 0.6931471805599453f;
  }

 private:
  float scale_log2_;
  float shift_[2] = {kNoShift, kNoShift};  // of the output
  float own_[2] = {kNoShift, kNoShift};    // of the latest weights and the sums
  float sum_[2] = {0.0f, 0.0f};            // of this block's weights, in this lane
};

// Multiplies the thread's rounded weights, of two rows, each by its row's factor.
template <class Element, int Squares>
__device__ __forceinline__ void scale_weights(uint32_t (&weights)[Squares][4],
                                              const float (&factors)[2]) {
#pragma unroll
  for (int k = 0; k < Squares; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = weights[k][i];
      const float factor = factors[i % 2];
      weights[k][i] = Element::pack(Element::unpack(static_cast<uint16_t>(pair)) * factor,
                                    Element::unpack(static_cast<uint16_t>(pair >> 16)) * factor);
    }
  }
}

}  // namespace autofa
