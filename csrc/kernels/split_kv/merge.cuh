// After the last tile: what the key warps of a row have found, each of its own keys, becomes one
// result. Everything is added up in a fixed order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "autofa/arch/element.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/block/exchange.cuh"
#include "autofa/block/softmax.cuh"

namespace autofa::split_kv {

// Who adds up what: of each KeyWarps squares of 16 columns that follow each other, a warp owns one,
// as store_columns wants it.
template <int RowWarps, int KeyWarps, int MTiles, int OTiles>
struct MergeShape {
  using RowValues = RowExchange<RowWarps, KeyWarps, MTiles>;
  static constexpr int row_warps = RowWarps;
  static constexpr int key_warps = KeyWarps;
  static constexpr int m_tiles = MTiles;
  static constexpr int o_tiles = OTiles;
  static constexpr int owners = std::min(KeyWarps, OTiles / 2);
  static constexpr int own_tiles = (OTiles / 2 + KeyWarps - 1) / KeyWarps * 2;

  static constexpr int fragment_bytes = 32 * 16;  // a 16x8 tile in f32: four words of each lane
  // What one of its tiles takes of every owner: the fragments from all other key warps.
  static constexpr int step_bytes = RowWarps * MTiles * owners * (KeyWarps - 1) * fragment_bytes;
  static constexpr int least_bytes = RowValues::bytes + step_bytes;

  // The tile of the output that is a warp's own one of this number.
  static __device__ __forceinline__ constexpr int tile(int own_tile, int key_warp) {
    return (own_tile / 2 * KeyWarps + key_warp) * 2 + own_tile % 2;
  }
};

// The natural log of what a row's weights are divided by, which is the log-sum of one whose weights
// sum up to 1; -inf for a row that saw no key.
template <int MTiles>
__device__ __forceinline__ float log_divisor(OnlineSoftmax<MTiles> softmax, int m, int half) {
  if (softmax.sum(m, half) == 0.0f) return -kInfinity;
  softmax.sum(m, half) = 1.0f;
  return softmax.log_sum(m, half);
}

// total = the warp's own tiles of the sum of factor * out over the key warps, through shared memory
// that only the caller's thread may still be reading. It does as many tiles at a time as have room.
template <class Shape, int SharedBytes, int MTiles, int OTiles, int OwnTiles>
__device__ __forceinline__ void sum_outputs(float (&total)[MTiles][OwnTiles][4],
                                            const float (&out)[MTiles][OTiles][4],
                                            const float (&factor)[MTiles][2], uint32_t shared) {
  constexpr int others = Shape::key_warps - 1;
  constexpr int room = SharedBytes / Shape::step_bytes;
  constexpr int steps = room < OwnTiles ? room : OwnTiles;
  static_assert(steps > 0);
  const WarpPlace<Shape::key_warps> place;
  const uint32_t lane = shared + static_cast<int>(threadIdx.x) % 32 * 16;
  const auto fragment = [&](int step, int owner, int other, int m) {
    const int row_warp = step * Shape::row_warps + place.row;
    const int index = ((row_warp * Shape::owners + owner) * others + other) * MTiles + m;
    return lane + index * Shape::fragment_bytes;
  };

#pragma unroll
  for (int first = 0; first < OwnTiles; first += steps) {
    if (first > 0) __syncthreads();  // those before have been read
#pragma unroll
    for (int own = first; own < OwnTiles && own < first + steps; ++own) {
#pragma unroll
      for (int owner = 0; owner < Shape::owners; ++owner) {
        const int n = Shape::tile(own, owner);
        if (n >= OTiles) continue;
#pragma unroll
        for (int m = 0; m < MTiles; ++m) {
          float part[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) part[i] = out[m][n][i] * factor[m][i / 2];
          if (owner == place.column) {
#pragma unroll
            for (int i = 0; i < 4; ++i) total[m][own][i] = part[i];
          } else {
            const int other = place.column < owner ? place.column : place.column - 1;
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(part[i]);
            store_shared_16(fragment(own - first, owner, other, m), words);
          }
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int own = first; own < OwnTiles && own < first + steps; ++own) {
      if (Shape::tile(own, place.column) >= OTiles) continue;
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
#pragma unroll
        for (int other = 0; other < others; ++other) {
          uint32_t words[4];
          load_shared_16(words, fragment(own - first, place.column, other, m));
#pragma unroll
          for (int i = 0; i < 4; ++i) total[m][own][i] += __uint_as_float(words[i]);
        }
      }
    }
  }
}

// Merges what each warp's `softmax`, finished, and `out` hold of its rows; `total` gets the warp's
// own tiles. The parts are to a softmax what keys are: the logs of their divisors are its scores.
// All threads call it together, with SharedBytes of shared memory that they have no more use for.
template <class Shape, int SharedBytes, int MTiles, int OTiles, int OwnTiles>
__device__ __forceinline__ OnlineSoftmax<MTiles> merge(float (&total)[MTiles][OwnTiles][4],
                                                       OnlineSoftmax<MTiles>& softmax,
                                                       const float (&out)[MTiles][OTiles][4],
                                                       uint32_t shared) {
  constexpr float kLog2e = 1.4426950408889634f;
  const typename Shape::RowValues key_warps(shared);
  float divisor[MTiles][2], top[MTiles][2], factor[MTiles][2], sum[MTiles][2];
  for_each_row<MTiles>(
      [&](int m, int half) { divisor[m][half] = top[m][half] = log_divisor(softmax, m, half); });
  key_warps.reduce(top, [](float a, float b) { return fmaxf(a, b); });
  for_each_row<MTiles>([&](int m, int half) {
    const bool empty = divisor[m][half] == -kInfinity;
    const float above = divisor[m][half] - top[m][half];
    factor[m][half] = empty ? 0.0f : exp2_fast(above * kLog2e);
    sum[m][half] = softmax.sum(m, half) * factor[m][half];
  });
  key_warps.reduce(sum, [](float a, float b) { return a + b; });

  OnlineSoftmax<MTiles> merged(kLog2e);
  merged.raise(top, total);
  for_each_row<MTiles>([&](int m, int half) { merged.sum(m, half) = sum[m][half]; });
  sum_outputs<Shape, SharedBytes - Shape::RowValues::bytes>(total, out, factor,
                                                            shared + Shape::RowValues::bytes);
  return merged;
}

}  // namespace autofa::split_kv
