// The way out for column warps: from accumulators straight to global memory, with no shared memory.
#pragma once

#include <cstdint>

#include "autofa/arch/element.cuh"
#include "autofa/block/exchange.cuh"
#include "autofa/block/softmax.cuh"

namespace autofa {

// Sums the weights of a row over all lanes and column warps that share it.
template <int MTiles, class Exchange>
__device__ __forceinline__ void finish_shared(OnlineSoftmax<MTiles>& softmax,
                                              const Exchange& exchange) {
  softmax.finish();
  float sums[MTiles][2];
  for_each_row<MTiles>([&](int m, int half) { sums[m][half] = softmax.sum(m, half); });
  exchange.reduce(sums, [](float a, float b) { return a + b; });
  for_each_row<MTiles>([&](int m, int half) { softmax.sum(m, half) = sums[m][half]; });
}

// Transposes a 4x4 matrix over the four lanes of a row: lane i gives column i and gets row i.
__device__ __forceinline__ void transpose_over_row(uint32_t (&words)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const bool upper = lane & bit;
      const uint32_t sent = upper ? words[i] : words[i | bit];
      const uint32_t received = __shfl_xor_sync(~0u, sent, bit);
      words[i | bit] = upper ? words[i | bit] : received;
      words[i] = upper ? received : words[i];
    }
  }
}

// Writes the warp's rows, of which `row` is the lane's first, as far as they lie below `row_count`,
// and its columns of `matrix`, as slice_products.cuh deals them out. Four lanes put together what
// they have of a row to 16-byte stores that fill 32-byte sectors.
template <class Element, int HeadDim, int ColumnWarps, int MTiles, int OTiles>
__device__ __forceinline__ void store_columns(const float (&out)[MTiles][OTiles][4],
                                              const OnlineSoftmax<MTiles>& softmax, void* matrix,
                                              int64_t row_stride, int row, int row_count,
                                              int column_warp) {
  const int lane = threadIdx.x % 4;
  for_each_row<MTiles>([&](int m, int half) {
    const float factor = softmax.normalizer(m, half);
    const int own = row + m * 16 + half * 8;
    char* target = static_cast<char*>(matrix) + own * row_stride * 2;
#pragma unroll
    for (int first = 0; first < OTiles; first += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool there = first + i < OTiles;
        const auto& sums = out[m][there ? first + i : first];
        words[i] = there ? Element::pack(sums[2 * half] * factor, sums[2 * half + 1] * factor) : 0u;
      }
      transpose_over_row(words);
      const int square = (first + lane) / 2 * ColumnWarps + column_warp;
      const int column = square * 16 + lane % 2 * 8;
      if (own < row_count && column < HeadDim && first + lane < OTiles) {
        *reinterpret_cast<uint4*>(target + column * 2) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  });
}

// `sums` are those of row 0 on; `row` as above.
template <int MTiles>
__device__ __forceinline__ void store_row_log_sums(const OnlineSoftmax<MTiles>& softmax,
                                                   float* sums, int row, int row_count) {
  if (threadIdx.x % 4 != 0) return;
  for_each_row<MTiles>([&](int m, int half) {
    const int own = row + m * 16 + half * 8;
    if (own < row_count) sums[own] = softmax.log_sum(m, half);
  });
}

}  // namespace autofa
