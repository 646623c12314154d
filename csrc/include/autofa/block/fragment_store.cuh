// Accumulator fragments to global memory in 16-byte stores, without shared memory.
#pragma once

#include <cstdint>

#include "autofa/arch/element.cuh"

namespace autofa {

// Of the four lanes of a quad, lane i gets word i of each: word j is then what lane j had there.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int low = 0; low < 4; ++low) {
      if (low & bit) continue;
      const int high = low | bit;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? words[low] : words[high], bit);
      if (upper) {
        words[low] = got;
      } else {
        words[high] = got;
      }
    }
  }
}

// Writes one row's part of a quad: of each tile of 8 columns out[n][2 half] and out[n][2 half + 1],
// times `factor`, to `row` of `columns` elements, a multiple of 8. With `stored` false it only
// takes part.
template <class Element, int Tiles>
__device__ __forceinline__ void store_row(const float (&out)[Tiles][4], int half, float factor,
                                          char* row, int columns, bool stored) {
  static_assert(Tiles % 4 == 0, "a lane gets one tile in four");
#pragma unroll
  for (int first = 0; first < Tiles; first += 4) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] =
          Element::pack(out[first + i][2 * half] * factor, out[first + i][2 * half + 1] * factor);
    }
    transpose_in_quad(words);
    const int column = (first + static_cast<int>(threadIdx.x) % 4) * 8;
    if (stored && column < columns) {
      *reinterpret_cast<uint4*>(row + column * 2) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace autofa
