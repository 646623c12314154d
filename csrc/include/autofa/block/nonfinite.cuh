// Keeps infinities and NaNs of hidden values out of the product p v, where 0 * NaN would be NaN.
#pragma once

#include <cstdint>

#include "autofa/arch/element.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/block/softmax.cuh"

namespace autofa {

// The top bit of each 16-bit half that is infinite or NaN: adding one to an exponent of all ones
// carries into the sign's place.
template <class Element>
__device__ __forceinline__ uint32_t nonfinite_bits(uint32_t word) {
  constexpr uint32_t exponents = Element::exponent * 0x10001u;
  constexpr uint32_t ones = 0x80008000u - exponents;
  return ((word & exponents) + ones) & 0x80008000u;
}

// For a tile that hides some keys from some rows: adds its non-finite values to `out` for the rows
// that see them, then replaces them by zeros in shared memory. All threads of the block call it
// together, after `out` was rescaled and before the tile's product. `row` is the thread's first
// row; mask.sees(row, key) says who sees what.
//
// Where warps share rows, of the tile's squares of 16 columns each has those column_warp,
// column_warp + ColumnWarps ..., and their sums in `out` from `first_tile` on.
template <class Element, class VTile, int ColumnWarps = 1, class Loader, class Mask, int MTiles,
          int OTiles>
__device__ __forceinline__ void isolate_nonfinite(float (&out)[MTiles][OTiles][4],
                                                  const Loader& loader, uint32_t values,
                                                  const Mask& mask, int row, int first_key,
                                                  int first_tile = 0, int column_warp = 0) {
  uint32_t found = 0;
  loader.for_each_chunk(values, [&](uint32_t address) {
    uint32_t words[4];
    load_shared_16(words, address);
#pragma unroll
    for (int i = 0; i < 4; ++i) found |= nonfinite_bits<Element>(words[i]);
  });
  if (!__syncthreads_or(found != 0)) return;

#pragma unroll 1
  for (int key = 0; key < VTile::rows; ++key) {
    // A bit per row of those that see the key. In a loop: this is rare, but its registers count.
    uint32_t seen = 0;
#pragma unroll 1
    for (int i = 0; i < 2 * MTiles; ++i) {
      if (mask.sees(row + i * 8, first_key + key)) seen |= 1u << i;
    }
    // Chunks of a row lie apart by an XOR, and `column_warp` has no bit in common with the steps.
    const uint32_t own = values + threadIdx.x % 4 * 4 +
                         VTile::offset(key, column_warp * 2 % VTile::row_chunks,
                                       column_warp * 2 / VTile::row_chunks);
#pragma unroll
    for (int n = 0; n < VTile::cols / (8 * ColumnWarps); ++n) {
      const int col = n / 2 * ColumnWarps * 2 + n % 2;
      const uint32_t word = load_shared_4((own ^ (col % VTile::row_chunks * 16)) +
                                          col / VTile::row_chunks * VTile::panel_bytes);
      const uint32_t odd = nonfinite_bits<Element>(word);
      if (odd == 0) continue;
      for_each_row<MTiles>([&](int m, int half) {
        if (!(seen >> (2 * m + half) & 1u)) return;
        if (odd & 0x8000u) out[m][first_tile + n][2 * half] += Element::unpack(word & 0xffffu);
        if (odd >> 16) out[m][first_tile + n][2 * half + 1] += Element::unpack(word >> 16);
      });
    }
  }
  __syncthreads();
  loader.for_each_chunk(values, [&](uint32_t address) {
    uint32_t words[4];
    load_shared_16(words, address);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] &= ~((nonfinite_bits<Element>(words[i]) >> 15) * 0xffffu);
    store_shared_16(address, words);
  });
  __syncthreads();
}

}  // namespace autofa
