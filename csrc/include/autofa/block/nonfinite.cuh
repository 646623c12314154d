// Keeps infinities and NaNs of hidden values out of the product p v, where 0 * NaN would be NaN.
#pragma once

#include <cstdint>

#include "autofa/arch/element.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/block/softmax.cuh"

namespace autofa {

// Which 16-bit halves of a word are infinite or NaN, as 0xffff each.
template <class Element>
__device__ __forceinline__ uint32_t nonfinite_halves(uint32_t word) {
  constexpr uint32_t exponent = Element::exponent;
  const uint32_t low = (word & exponent) == exponent ? 0x0000ffffu : 0u;
  const uint32_t high = (word >> 16 & exponent) == exponent ? 0xffff0000u : 0u;
  return low | high;
}

// For a tile that hides some keys from some rows: adds its non-finite values to `out` for the rows
// that see them, then replaces them by zeros in shared memory. All threads of the block call it
// together, after `out` was rescaled and before the tile's product. `row` is the thread's first
// row.
template <class Element, class VTile, class Loader, class Limit, int MTiles, int OTiles>
__device__ __forceinline__ void isolate_nonfinite(float (&out)[MTiles][OTiles][4],
                                                  const Loader& loader, uint32_t values,
                                                  const Limit& limit, int row, int first_key) {
  bool found = false;
  loader.for_each_chunk(values, [&](uint32_t address) {
    uint32_t words[4];
    load_shared_16(words, address);
#pragma unroll
    for (int i = 0; i < 4; ++i) found |= nonfinite_halves<Element>(words[i]) != 0;
  });
  if (!__syncthreads_or(found)) return;

#pragma unroll 1
  for (int key = 0; key < VTile::rows; ++key) {
#pragma unroll
    for (int n = 0; n < OTiles; ++n) {
      const uint32_t chunk = VTile::offset(key, n % VTile::row_chunks, n / VTile::row_chunks);
      const uint32_t word = load_shared_4(values + chunk + threadIdx.x % 4 * 4);
      const uint32_t odd = nonfinite_halves<Element>(word);
      if (odd == 0) continue;
      for_each_row<MTiles>([&](int m, int half) {
        if (first_key + key >= limit(row + m * 16 + half * 8)) return;
        if (odd & 0xffffu) out[m][n][2 * half] += Element::unpack(word & 0xffffu);
        if (odd >> 16) out[m][n][2 * half + 1] += Element::unpack(word >> 16);
      });
    }
  }
  __syncthreads();
  loader.for_each_chunk(values, [&](uint32_t address) {
    uint32_t words[4];
    load_shared_16(words, address);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] &= ~nonfinite_halves<Element>(words[i]);
    store_shared_16(address, words);
  });
  __syncthreads();
}

}  // namespace autofa
