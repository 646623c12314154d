// Which keys a query row may attend to: the tail of the key sequence, the causal triangle, and
// explicit masks.
#pragma once

#include "autofa/abi.h"
#include "autofa/block/explicit_mask.cuh"
#include "autofa/block/softmax.cuh"

namespace autofa {

// The visible keys of row r are [0, limit(r)), and limit never falls with r.
template <int Causal>
struct KeyLimit {
  static constexpr bool on_every_tile = false;  // whether tiles below any limit need masking too

  int seqlen_k;
  int diagonal;  // row r sees keys up to r + diagonal

  __device__ __forceinline__ KeyLimit(int rows, int keys)
      : seqlen_k(keys), diagonal(Causal == AUTOFA_CAUSAL_LOWER_RIGHT ? keys - rows : 0) {}

  __device__ __forceinline__ int operator()(int row) const {
    if constexpr (Causal == AUTOFA_CAUSAL_NONE) return seqlen_k;
    return max(0, min(seqlen_k, row + diagonal + 1));
  }

  __device__ __forceinline__ bool sees(int row, int key) const { return key < (*this)(row); }
};

// Sets the scores of hidden keys to -inf. `row` is the thread's first row, `first_key` the tile's.
template <int MTiles, int NTiles, class Limit>
__device__ __forceinline__ void mask_scores(float (&scores)[MTiles][NTiles][4], const Limit& limit,
                                            int row, int first_key) {
  const int first_col = first_key + threadIdx.x % 4 * 2;
  for_each_row<MTiles>([&](int m, int half) {
    const int visible = limit(row + m * 16 + half * 8) - first_col;
#pragma unroll
    for (int n = 0; n < NTiles; ++n) {
      if (n * 8 >= visible) scores[m][n][2 * half] = -kInfinity;
      if (n * 8 + 1 >= visible) scores[m][n][2 * half + 1] = -kInfinity;
    }
  });
}

// All that hides keys of one head. As a limit (KeyTiles) it is that of the causal triangle.
template <int Causal, int Mask>
class KeyMask : public KeyLimit<Causal> {
  static_assert(Mask == AUTOFA_MASK_NONE || Causal == AUTOFA_CAUSAL_NONE,
                "explicit masks have causality in them");

 public:
  static constexpr bool on_every_tile = true;
  // Whether keys can be hidden that exist: their values then must not contribute.
  static constexpr bool hides_values = true;

  __device__ __forceinline__ KeyMask(const autofa_params& call, int batch, int head)
      : KeyLimit<Causal>(static_cast<int>(call.seqlen_q), static_cast<int>(call.seqlen_k)),
        explicit_(call, batch, head) {}

  // What the softmax of masked scores is to multiply them by.
  __device__ __forceinline__ SoftmaxScale softmax_scale(float scale) const {
    if constexpr (Mask == AUTOFA_MASK_ADDITIVE) return SoftmaxScale();
    return SoftmaxScale(scale);
  }

  template <int MTiles, int NTiles>
  __device__ __forceinline__ void apply(float (&scores)[MTiles][NTiles][4], int row,
                                        int first_key) const {
    explicit_.apply(scores, row, first_key);
  }

  __device__ __forceinline__ bool sees(int row, int key) const { return explicit_.sees(row, key); }

 private:
  ExplicitMask<Mask> explicit_;
};

template <int Causal>
class KeyMask<Causal, AUTOFA_MASK_NONE> : public KeyLimit<Causal> {
 public:
  static constexpr bool hides_values = Causal != AUTOFA_CAUSAL_NONE;

  __device__ __forceinline__ KeyMask(const autofa_params& call, int, int)
      : KeyLimit<Causal>(static_cast<int>(call.seqlen_q), static_cast<int>(call.seqlen_k)) {}

  __device__ __forceinline__ SoftmaxScale softmax_scale(float scale) const {
    return SoftmaxScale(scale);
  }

  template <int MTiles, int NTiles>
  __device__ __forceinline__ void apply(float (&scores)[MTiles][NTiles][4], int row,
                                        int first_key) const {
    mask_scores(scores, *this, row, first_key);
  }
};

}  // namespace autofa
