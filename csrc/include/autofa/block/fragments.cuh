// The two products of attention on one warp's fragments: scores = q k^T, out += p v.
//
// A warp owns MTiles x 16 query rows. An accumulator [m][n][4] holds, of the 16x8 tile (m, n), the
// elements (row, col), (row, col + 1), (row + 8, col), (row + 8, col + 1) with row = lane / 4 and
// col = lane % 4 * 2.
#pragma once

#include <cstdint>

#include "autofa/arch/element.cuh"
#include "autofa/arch/mma_sync.cuh"
#include "autofa/block/tile.cuh"

namespace autofa {

// A warp's queries: the first HeldSquares 16 columns in registers, the others read from shared
// memory again for every key tile.
template <class QTile, int MTiles, int HeldSquares>
class Queries {
  static_assert(HeldSquares <= QTile::cols / 16);

 public:
  __device__ __forceinline__ Queries(uint32_t tile, int first_row)
      : reader_(FragmentReader<QTile>::by_rows(tile, first_row)) {
#pragma unroll
    for (int k = 0; k < HeldSquares; ++k) {
#pragma unroll
      for (int m = 0; m < MTiles; ++m) reader_.read(held_[k][m], m, k);
    }
  }

  __device__ __forceinline__ void read(uint32_t (&a)[MTiles][4], int k) const {
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
      if (k < HeldSquares) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = held_[k][m][i];
      } else {
        reader_.read(a[m], m, k);
      }
    }
  }

 private:
  FragmentReader<QTile> reader_;
  uint32_t held_[HeldSquares > 0 ? HeldSquares : 1][MTiles][4];
};

// f32 sums of a 16x8 tile += f16 ones.
__device__ __forceinline__ void add_sums(float (&sums)[4], const uint32_t (&addend)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sums[2 * i] += F16::unpack(addend[i] & 0xffffu);
    sums[2 * i + 1] += F16::unpack(addend[i] >> 16);
  }
}

template <int MTiles, int NTiles>
__device__ __forceinline__ void clear_sums(float (&sums)[MTiles][NTiles][4]) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m) {
#pragma unroll
    for (int n = 0; n < NTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
    }
  }
}

// sums += queries * keys^T for one key tile, in the type of `sums`.
template <class Element, class KTile, class Queries, class Sums, int MTiles, int NTiles>
__device__ __forceinline__ void add_qk(Sums (&sums)[MTiles][NTiles], const Queries& queries,
                                       uint32_t keys) {
  static_assert(NTiles * 8 == KTile::rows);
  const auto reader = FragmentReader<KTile>::by_cols(keys);
#pragma unroll
  for (int k = 0; k < KTile::cols / 16; ++k) {
    uint32_t a[MTiles][4];
    queries.read(a, k);
#pragma unroll
    for (int n = 0; n < NTiles / 2; ++n) {
      uint32_t b[4];
      reader.read(b, n, k);
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
        mma_m16n8k16<Element>(sums[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16<Element>(sums[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// scores = queries * keys^T for one key tile, accumulated over the head dim in f32 or f16.
template <class Element, class KTile, int Accumulate, class Queries, int MTiles, int NTiles>
__device__ __forceinline__ void multiply_qk(float (&scores)[MTiles][NTiles][4],
                                            const Queries& queries, uint32_t keys) {
  clear_sums(scores);
  if constexpr (Accumulate == AUTOFA_F32) {
    add_qk<Element, KTile>(scores, queries, keys);
  } else {
    uint32_t sums[MTiles][NTiles][2] = {};
    add_qk<Element, KTile>(sums, queries, keys);
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
#pragma unroll
      for (int n = 0; n < NTiles; ++n) add_sums(scores[m][n], sums[m][n]);
    }
  }
}

// Weights of 16 keys as an A fragment: the accumulator layout is, rounded to 16 bits, just that.
template <class Element, int NTiles>
__device__ __forceinline__ void pack_weights(uint32_t (&a)[4], const float (&weights)[NTiles][4],
                                             int k) {
  const auto& low = weights[2 * k];
  const auto& high = weights[2 * k + 1];
  a[0] = Element::pack(low[0], low[1]);
  a[1] = Element::pack(low[2], low[3]);
  a[2] = Element::pack(high[0], high[1]);
  a[3] = Element::pack(high[2], high[3]);
}

// out += weights * values for one key tile, with sums over the keys of the tile in f16, which are
// added to `out` in f32. Weights must be at most 1. All of them are made first: then a column's
// sums need few registers, and not long.
template <class Element, class VTile, int MTiles, int NTiles, int OTiles, class Weigh>
__device__ __forceinline__ void accumulate_pv_in_f16(float (&out)[MTiles][OTiles][4],
                                                     const float (&weights)[MTiles][NTiles][4],
                                                     uint32_t values, Weigh weigh) {
  const auto reader = FragmentReader<VTile>::by_rows(values);
  uint32_t a[NTiles / 2][MTiles][4];
#pragma unroll
  for (int k = 0; k < NTiles / 2; ++k) {
    weigh(k);
#pragma unroll
    for (int m = 0; m < MTiles; ++m) pack_weights<Element>(a[k][m], weights[m], k);
  }
#pragma unroll
  for (int n = 0; n < OTiles / 2; ++n) {
    uint32_t sums[MTiles][2][2] = {};
#pragma unroll
    for (int k = 0; k < NTiles / 2; ++k) {
      uint32_t b[4];
      reader.read_transposed(b, k, n);
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
        mma_m16n8k16<Element>(sums[m][0], a[k][m], b[0], b[1]);
        mma_m16n8k16<Element>(sums[m][1], a[k][m], b[2], b[3]);
      }
    }
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
      add_sums(out[m][2 * n], sums[m][0]);
      add_sums(out[m][2 * n + 1], sums[m][1]);
    }
  }
}

// out += weights * values for one key tile; the weights never leave the registers.
//
// weigh(k) is called to make the weights of 16 keys, one step before they are multiplied: so the
// exponentials of a step run behind the mma instructions of the step before. Left to the compiler,
// they all came first in the causal kernels, which cost those 3-5% on an H200.
template <class Element, class VTile, int Accumulate, int MTiles, int NTiles, int OTiles,
          class Weigh>
__device__ __forceinline__ void accumulate_pv(float (&out)[MTiles][OTiles][4],
                                              const float (&weights)[MTiles][NTiles][4],
                                              uint32_t values, Weigh weigh) {
  static_assert(NTiles * 8 == VTile::rows && OTiles * 8 == VTile::cols);
  if constexpr (Accumulate == AUTOFA_F16) {
    accumulate_pv_in_f16<Element, VTile>(out, weights, values, weigh);
    return;
  }
  const auto reader = FragmentReader<VTile>::by_rows(values);
  weigh(0);
#pragma unroll
  for (int k = 0; k < NTiles / 2; ++k) {
    uint32_t a[MTiles][4];
#pragma unroll
    for (int m = 0; m < MTiles; ++m) pack_weights<Element>(a[m], weights[m], k);
    if (k + 1 < NTiles / 2) weigh(k + 1);
#pragma unroll
    for (int n = 0; n < OTiles / 2; ++n) {
      uint32_t b[4];
      reader.read_transposed(b, k, n);
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
        mma_m16n8k16<Element>(out[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16<Element>(out[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

}  // namespace autofa
