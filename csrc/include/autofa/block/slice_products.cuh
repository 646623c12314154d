// The two products of attention where operands come in pieces and column warps share query rows.
//
// Accumulators are laid out as in fragments.cuh. Of the output's squares of 16 columns, column warp
// w of W owns those w, w + W, w + 2W ...: so each owns the same part of every panel.
#pragma once

#include <cstdint>

#include "autofa/arch/element.cuh"
#include "autofa/arch/mma_sync.cuh"
#include "autofa/block/fragments.cuh"
#include "autofa/block/tile.cuh"

namespace autofa {

template <int MTiles, int NTiles>
__device__ __forceinline__ void negate(float (&sums)[MTiles][NTiles][4]) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m) {
#pragma unroll
    for (int n = 0; n < NTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = -sums[m][n][i];
    }
  }
}

// sums += queries * keys^T over one slice of the head dim, for the rows from `first_row` and the
// keys from `first_key` on.
template <class Element, class QTile, class KTile, class Sums, int MTiles, int NTiles>
__device__ __forceinline__ void add_qk_sums(Sums (&sums)[MTiles][NTiles], uint32_t queries,
                                            uint32_t keys, int first_row, int first_key) {
  static_assert(QTile::cols == KTile::cols);
  const auto q = FragmentReader<QTile>::by_rows(queries, first_row);
  const auto k = FragmentReader<KTile>::by_cols(keys).from(first_key / 16, 0);
#pragma unroll
  for (int step = 0; step < QTile::cols / 16; ++step) {
    uint32_t a[MTiles][4];
#pragma unroll
    for (int m = 0; m < MTiles; ++m) q.read(a[m], m, step);
#pragma unroll
    for (int n = 0; n < NTiles / 2; ++n) {
      uint32_t b[4];
      k.read(b, n, step);
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
        mma_m16n8k16<Element>(sums[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16<Element>(sums[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// The same onto f32 scores; with Accumulate f16, the sums over the slice itself are of 16 bits.
template <class Element, class QTile, class KTile, int Accumulate, int MTiles, int NTiles>
__device__ __forceinline__ void add_qk_slice(float (&scores)[MTiles][NTiles][4], uint32_t queries,
                                             uint32_t keys, int first_row, int first_key) {
  if constexpr (Accumulate == AUTOFA_F32) {
    add_qk_sums<Element, QTile, KTile>(scores, queries, keys, first_row, first_key);
  } else {
    uint32_t sums[MTiles][NTiles][2] = {};
    add_qk_sums<Element, QTile, KTile>(sums, queries, keys, first_row, first_key);
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
#pragma unroll
      for (int n = 0; n < NTiles; ++n) add_sums(scores[m][n], sums[m][n]);
    }
  }
}

// out += weights * values for one piece of the values: keys from 16 * first_square of the key tile
// on, and as many of this column warp's columns as the piece has, from accumulator tile
// `first_tile` on.
template <class Element, class VTile, int ColumnWarps, int MTiles, int OTiles, class Weights>
__device__ __forceinline__ void add_pv_piece(float (&out)[MTiles][OTiles][4],
                                             const Weights& weights, int first_square,
                                             int first_tile, uint32_t values, int column_warp) {
  const auto v = FragmentReader<VTile>::by_rows(values).from(0, column_warp);
#pragma unroll
  for (int k = 0; k < VTile::rows / 16; ++k) {
    uint32_t a[MTiles][4];
    weights.read(a, first_square + k);
#pragma unroll
    for (int n = 0; n < VTile::cols / (16 * ColumnWarps); ++n) {
      uint32_t b[4];
      v.read_transposed(b, k, n * ColumnWarps);
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
        mma_m16n8k16<Element>(out[m][first_tile + 2 * n], a[m], b[0], b[1]);
        mma_m16n8k16<Element>(out[m][first_tile + 2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// The same with sums over the piece's keys in f16, which are then added to `out` in f32. Weights
// must be at most 1.
template <class Element, class VTile, int ColumnWarps, int MTiles, int OTiles, class Weights>
__device__ __forceinline__ void add_pv_piece_in_f16(float (&out)[MTiles][OTiles][4],
                                                    const Weights& weights, int first_square,
                                                    int first_tile, uint32_t values,
                                                    int column_warp) {
  const auto v = FragmentReader<VTile>::by_rows(values).from(0, column_warp);
  uint32_t a[VTile::rows / 16][MTiles][4];
#pragma unroll
  for (int k = 0; k < VTile::rows / 16; ++k) weights.read(a[k], first_square + k);
#pragma unroll
  for (int n = 0; n < VTile::cols / (16 * ColumnWarps); ++n) {
    uint32_t sums[MTiles][2][2] = {};
#pragma unroll
    for (int k = 0; k < VTile::rows / 16; ++k) {
      uint32_t b[4];
      v.read_transposed(b, k, n * ColumnWarps);
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
        mma_m16n8k16<Element>(sums[m][0], a[k][m], b[0], b[1]);
        mma_m16n8k16<Element>(sums[m][1], a[k][m], b[2], b[3]);
      }
    }
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
      add_sums(out[m][first_tile + 2 * n], sums[m][0]);
      add_sums(out[m][first_tile + 2 * n + 1], sums[m][1]);
    }
  }
}

}  // namespace autofa
