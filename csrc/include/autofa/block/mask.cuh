// Which keys a query row may attend to: the tail of the key sequence and the causal triangle.
#pragma once

#include "autofa/abi.h"
#include "autofa/block/softmax.cuh"

namespace autofa {

// The visible keys of row r are [0, limit(r)), and limit never falls with r.
template <int Causal>
struct KeyLimit {
  int seqlen_k;
  int diagonal;  // row r sees keys up to r + diagonal

  __device__ __forceinline__ KeyLimit(int rows, int keys)
      : seqlen_k(keys), diagonal(Causal == AUTOFA_CAUSAL_LOWER_RIGHT ? keys - rows : 0) {}

  __device__ __forceinline__ int operator()(int row) const {
    if constexpr (Causal == AUTOFA_CAUSAL_NONE) return seqlen_k;
    return max(0, min(seqlen_k, row + diagonal + 1));
  }
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

}  // namespace autofa
