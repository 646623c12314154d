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

// A warp's queries: in registers, or read from shared memory again for every key tile.
template <class QTile, int MTiles, bool InRegisters>
class Queries {
  static constexpr int squares = QTile::cols / 16;

 public:
  __device__ __forceinline__ Queries(uint32_t tile, int first_row)
      : reader_(FragmentReader<QTile>::by_rows(tile, first_row)) {
    if constexpr (InRegisters) {
#pragma unroll
      for (int k = 0; k < squares; ++k) {
#pragma unroll
        for (int m = 0; m < MTiles; ++m) reader_.read(held_[k][m], m, k);
      }
    }
  }

  __device__ __forceinline__ void read(uint32_t (&a)[MTiles][4], int k) const {
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
      if constexpr (InRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = held_[k][m][i];
      } else {
        reader_.read(a[m], m, k);
      }
    }
  }

 private:
  FragmentReader<QTile> reader_;
  uint32_t held_[InRegisters ? squares : 1][MTiles][4];
};

// scores = queries * keys^T for one key tile.
template <class Element, class KTile, class Queries, int MTiles, int NTiles>
__device__ __forceinline__ void multiply_qk(float (&scores)[MTiles][NTiles][4],
                                            const Queries& queries, uint32_t keys) {
  static_assert(NTiles * 8 == KTile::rows);
  const auto reader = FragmentReader<KTile>::by_cols(keys);
#pragma unroll
  for (int m = 0; m < MTiles; ++m) {
#pragma unroll
    for (int n = 0; n < NTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.0f;
    }
  }
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
        mma_m16n8k16<Element>(scores[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16<Element>(scores[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// out += weights * values for one key tile. The accumulator layout of the weights is, rounded to
// 16 bits, the A fragment layout: they never leave the registers.
//
// weigh(k) is called to make the weights of 16 keys, one step before they are multiplied: so the
// exponentials of a step run behind the mma instructions of the step before. Left to the compiler,
// they all came first in the causal kernels, which cost those 3-5% on an H200.
template <class Element, class VTile, int MTiles, int NTiles, int OTiles, class Weigh>
__device__ __forceinline__ void accumulate_pv(float (&out)[MTiles][OTiles][4],
                                              const float (&weights)[MTiles][NTiles][4],
                                              uint32_t values, Weigh weigh) {
  static_assert(NTiles * 8 == VTile::rows && OTiles * 8 == VTile::cols);
  const auto reader = FragmentReader<VTile>::by_rows(values);
  weigh(0);
#pragma unroll
  for (int k = 0; k < NTiles / 2; ++k) {
    uint32_t a[MTiles][4];
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
      const auto& low = weights[m][2 * k];
      const auto& high = weights[m][2 * k + 1];
      a[m][0] = Element::pack(low[0], low[1]);
      a[m][1] = Element::pack(low[2], low[3]);
      a[m][2] = Element::pack(high[0], high[1]);
      a[m][3] = Element::pack(high[2], high[3]);
    }
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
