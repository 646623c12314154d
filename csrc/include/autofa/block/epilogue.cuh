// From the accumulators of a warp to global memory: normalized output and log-sum-exp.
#pragma once

#include <cstdint>

#include "autofa/arch/element.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/block/softmax.cuh"
#include "autofa/block/tile.cuh"

namespace autofa {

// Writes the warp's rows of the tile that starts at row `tile_row` of `matrix`, as far as they lie
// below `row_count`. The warp's own rows of the tile in shared memory, from `warp_row` on, turn the
// fragments into 16-byte stores; no other warp touches them.
template <class Element, class Tile, int HeadDim, int MTiles, int OTiles>
__device__ __forceinline__ void store_output(const float (&out)[MTiles][OTiles][4],
                                             const OnlineSoftmax<MTiles>& softmax, uint32_t tile,
                                             int warp_row, void* matrix, int64_t row_stride,
                                             int tile_row, int row_count) {
  const int lane = threadIdx.x % 32;
  __syncwarp();  // every lane has read its queries from these rows
  for_each_row<MTiles>([&](int m, int half) {
    const float factor = softmax.normalizer(m, half);
    const int row = warp_row + m * 16 + half * 8 + lane / 4;
#pragma unroll
    for (int n = 0; n < OTiles; ++n) {
      const uint32_t offset = Tile::offset(row, n % Tile::row_chunks, n / Tile::row_chunks);
      store_shared_4(tile + offset + lane % 4 * 4,
                     Element::pack(out[m][n][2 * half] * factor, out[m][n][2 * half + 1] * factor));
    }
  });
  __syncwarp();

  constexpr int rows_per_pass = 32 / Tile::row_chunks;
  const int chunk = lane % Tile::row_chunks;
#pragma unroll
  for (int pass = 0; pass < MTiles * 16 / rows_per_pass; ++pass) {
    const int row = warp_row + pass * rows_per_pass + lane / Tile::row_chunks;
    if (tile_row + row >= row_count) continue;
    char* target = static_cast<char*>(matrix) + (tile_row + row) * row_stride * 2 + chunk * 16;
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel) {
      if ((panel * Tile::row_chunks + chunk) * 8 < HeadDim) {
        uint32_t words[4];
        load_shared_16(words, tile + Tile::offset(row, chunk, panel));
        *reinterpret_cast<uint4*>(target + panel * Tile::row_bytes) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// `sums` are those of row 0 on; otherwise as above.
template <int MTiles>
__device__ __forceinline__ void store_log_sums(const OnlineSoftmax<MTiles>& softmax, float* sums,
                                               int warp_row, int tile_row, int row_count) {
  const int lane = threadIdx.x % 32;
  if (lane % 4 != 0) return;
  for_each_row<MTiles>([&](int m, int half) {
    const int row = tile_row + warp_row + m * 16 + half * 8 + lane / 4;
    if (row < row_count) sums[row] = softmax.log_sum(m, half);
  });
}

}  // namespace autofa
