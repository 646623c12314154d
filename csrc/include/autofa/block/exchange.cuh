// What the column warps of a block tell each other: warps that share query rows, where each works
// out the scores of its part of the keys and then the output of its part of the columns.
#pragma once

#include <cstdint>

#include "autofa/arch/element.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/block/fragments.cuh"
#include "autofa/block/softmax.cuh"

namespace autofa {

// Where a warp stands among RowWarps x ColumnWarps.
template <int ColumnWarps>
struct WarpPlace {
  int row, column;

  __device__ __forceinline__ WarpPlace()
      : row(static_cast<int>(threadIdx.x) / 32 / ColumnWarps),
        column(static_cast<int>(threadIdx.x) / 32 % ColumnWarps) {}
};

// One float per row and column warp in shared memory.
template <int RowWarps, int ColumnWarps, int MTiles>
class RowExchange {
  static constexpr int rows = RowWarps * MTiles * 16;

 public:
  static constexpr int bytes = ColumnWarps == 1 ? 0 : ColumnWarps * rows * 4;

  __device__ __forceinline__ explicit RowExchange(uint32_t shared)
      : shared_(shared + (place().row * MTiles * 16 + static_cast<int>(threadIdx.x) % 32 / 4) * 4) {
  }

  // Replaces the row values, which the four lanes of a row share, by `combine` over the column
  // warps in a fixed order. All threads call it together.
  template <class Combine>
  __device__ __forceinline__ void reduce(float (&values)[MTiles][2], Combine combine) const {
    if constexpr (ColumnWarps > 1) {
      __syncthreads();  // the values of the last time have been read
      const uint32_t own = shared_ + place().column * rows * 4;
      for_each_row<MTiles>([&](int m, int half) {
        store_shared_4(own + (m * 16 + half * 8) * 4, __float_as_uint(values[m][half]));
      });
      __syncthreads();
      for_each_row<MTiles>([&](int m, int half) {
        const uint32_t row = shared_ + (m * 16 + half * 8) * 4;
        float value = __uint_as_float(load_shared_4(row));
#pragma unroll
        for (int column = 1; column < ColumnWarps; ++column) {
          value = combine(value, __uint_as_float(load_shared_4(row + column * rows * 4)));
        }
        values[m][half] = value;
      });
    }
  }

 private:
  static __device__ __forceinline__ WarpPlace<ColumnWarps> place() { return {}; }

  uint32_t shared_;
};

// OnlineSoftmax::fit for rows that ColumnWarps warps share.
template <int MTiles, int NTiles, int OTiles, class Exchange>
__device__ __forceinline__ void fit_shared(OnlineSoftmax<MTiles>& softmax,
                                           const float (&scores)[MTiles][NTiles][4],
                                           float (&out)[MTiles][OTiles][4],
                                           const Exchange& exchange) {
  float top[MTiles][2];
  if (!__syncthreads_or(softmax.outgrown(top, scores))) return;
  for_each_row<MTiles>([&](int m, int half) { top[m][half] = softmax.over_row(top[m][half]); });
  exchange.reduce(top, [](float a, float b) { return fmaxf(a, b); });
  softmax.raise(top, out);
}

// The weights of one key tile as A fragments of 16 keys: in the registers of the warp that made
// them, or, where column warps share rows, in shared memory, and with `Gathered` from there in the
// registers of all who need them. In shared memory each lane's four words lie side by side: the
// lane that reads them needs just what the lane of the same number wrote.
template <class Element, int RowWarps, int ColumnWarps, int MTiles, int NTiles, bool Gathered>
class Weights {
  static constexpr int own_squares = NTiles / 2;
  static constexpr int squares = own_squares * ColumnWarps;
  static constexpr int square_bytes = 32 * 16;
  static constexpr bool in_registers = Gathered || ColumnWarps == 1;

 public:
  static constexpr int bytes = ColumnWarps == 1 ? 0 : RowWarps * squares * MTiles * square_bytes;

  __device__ __forceinline__ explicit Weights(uint32_t shared)
      : shared_(shared +
                (WarpPlace<ColumnWarps>().row * squares * MTiles * 32 + threadIdx.x % 32) * 16) {}

  // Keeps the weights of the warp's own keys, those of `square` 16.
  __device__ __forceinline__ void put(const float (&weights)[MTiles][NTiles][4], int square) {
    const int place = WarpPlace<ColumnWarps>().column * own_squares + square;
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
      if constexpr (ColumnWarps == 1) {
        pack_weights<Element>(held_[square][m], weights[m], square);
      } else {
        uint32_t words[4];
        pack_weights<Element>(words, weights[m], square);
        store_shared_16(shared_ + (place * MTiles + m) * square_bytes, words);
      }
    }
  }

  // To be called before read(), and after a barrier that follows put().
  __device__ __forceinline__ void gather() {
    if constexpr (Gathered && ColumnWarps > 1) {
#pragma unroll
      for (int square = 0; square < squares; ++square) {
#pragma unroll
        for (int m = 0; m < MTiles; ++m) load_shared_16(held_[square][m], at(square, m));
      }
    }
  }

  // The fragments of one 16 of all the tile's keys. In registers it wants an index that the
  // compiler knows.
  __device__ __forceinline__ void read(uint32_t (&a)[MTiles][4], int square) const {
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
      if constexpr (in_registers) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = held_[square][m][i];
      } else {
        load_shared_16(a[m], at(square, m));
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t at(int square, int m) const {
    return shared_ + (square * MTiles + m) * square_bytes;
  }

  uint32_t shared_;
  uint32_t held_[in_registers ? squares : 1][MTiles][4];
};

}  // namespace autofa
