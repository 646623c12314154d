// Register tiles: the two products of attention, with queries in the vector lanes.
//
// Both are sums over x of a(row, x) * b(x, query), where a is read one element at a time, just as
// keys and values lie in memory, and b (queries or weights) is stored with its lanes contiguous.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "autofa/cpu/vector.h"

namespace autofa::cpu_flash {

using cpu::Floats;
using cpu::kLanes;

inline int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

template <int Value>
using Constant = std::integral_constant<int, Value>;

// Calls f(Constant<value>) for a value in 1..Max known only at run time.
template <int Max, class F>
inline void with_constant(int value, F&& f) {
  if constexpr (Max > 1) {
    if (value != Max) return with_constant<Max - 1>(value, f);
  }
  f(Constant<Max>());
}

// Cuts rows [row, rows) into tiles, tallest first: f(Constant<height>, row). Four heights per width
// serve every remainder; a tile of each height costs compile time and gains nothing.
template <int Height, class F>
inline void for_each_tile(int64_t row, int64_t rows, F&& f) {
  for (; row + Height <= rows; row += Height) f(Constant<Height>(), row);
  if constexpr (Height > 1) {
    constexpr int next = Height > 8 ? 8 : Height > 4 ? 4 : Height > 2 ? 2 : 1;
    for_each_tile<next>(row, rows, f);
  }
}

template <int Rows, int Vectors>
struct Tile {
  Floats at[Rows][Vectors];

  void clear() {
    AUTOFA_UNROLL for (int i = 0; i < Rows; ++i) {
      AUTOFA_UNROLL for (int j = 0; j < Vectors; ++j) at[i][j] = Floats{};
    }
  }

  // Adds the products of terms [0, terms) to the vectors from `First` on. The element of row i in
  // term x is a[i * row_stride + x * term_stride], one of the two strides being the constant 1.
  // Each term fetches what lies `Ahead` elements behind its first.
  template <int First = 0, int Ahead = 0>
  __attribute__((always_inline)) void multiply_add(const float* a, int64_t row_stride,
                                                   int64_t term_stride, const float* b,
                                                   int64_t lanes, int64_t terms) {
#pragma GCC unroll 2
    for (int64_t x = 0; x < terms; ++x) {
      Floats right[Vectors];
      AUTOFA_UNROLL for (int j = First; j < Vectors; ++j) right[j] = cpu::load(b + j * kLanes);
      AUTOFA_UNROLL for (int i = 0; i < Rows; ++i) {
        const Floats left = cpu::broadcast(a[i * row_stride]);
        AUTOFA_UNROLL for (int j = First; j < Vectors; ++j) at[i][j] += left * right[j];
      }
      if (Ahead) __builtin_prefetch(a + Ahead);
      a += term_stride;
      b += lanes;
    }
  }
};

// scores(key, query) = K Q^T for `Keys` keys, over `dims` head dims. Added to what is there if
// `accumulate`; the largest score of each query goes into `row_max` unless that is null.
template <int Keys, int Vectors>
__attribute__((noinline)) void score_tile(const float* k, int64_t k_stride, const float* q,
                                          int64_t lanes, int64_t dims, bool accumulate,
                                          float* scores, float* row_max) {
  Tile<Keys, Vectors> tile;
  tile.clear();
  tile.multiply_add(k, k_stride, 1, q, lanes, dims);
  AUTOFA_UNROLL for (int i = 0; i < Keys; ++i) {
    AUTOFA_UNROLL for (int j = 0; j < Vectors; ++j) {
      float* to = scores + i * lanes + j * kLanes;
      if (accumulate) tile.at[i][j] += cpu::load(to);
      cpu::store(to, tile.at[i][j]);
    }
  }
  if (!row_max) return;
  AUTOFA_UNROLL for (int j = 0; j < Vectors; ++j) {
    Floats largest = cpu::load(row_max + j * kLanes);
    AUTOFA_UNROLL for (int i = 0; i < Keys; ++i) largest = cpu::max(largest, tile.at[i][j]);
    cpu::store(row_max + j * kLanes, largest);
  }
}

// Vector j of a panel sees the keys of a block before end[j]; the ends do not decrease.
template <int Vectors>
struct Staircase {
  int64_t end[Vectors];
};

namespace detail {

template <int First, int Rows, int Vectors, int MaxVectors>
__attribute__((always_inline)) inline void multiply_down(Tile<Rows, Vectors>& tile, const float* v,
                                                         int64_t v_stride, const float* weights,
                                                         int64_t lanes,
                                                         const Staircase<MaxVectors>& stairs) {
  if constexpr (First < Vectors) {
    const int64_t begin = First ? stairs.end[First ? First - 1 : 0] : 0;
    tile.template multiply_add<First>(v + begin * v_stride, 1, v_stride, weights + begin * lanes,
                                      lanes, stairs.end[First] - begin);
    multiply_down<First + 1>(tile, v, v_stride, weights, lanes, stairs);
  }
}

}  // namespace detail

// out(dim, query) = out * alpha + V^T weights for `Dims` output dims, over the keys of a block; the
// old `out` is not read if `first`. The sum of a block starts from zero and is added to the rest at
// its end: that halves the rounding error of long sums and costs nothing. `Prefetch` fetches the
// next cache line of every row of V.
template <int Dims, int Vectors, bool Stairs, bool Prefetch, int MaxVectors>
__attribute__((noinline)) void output_tile(const float* v, int64_t v_stride, const float* weights,
                                           int64_t lanes, const Staircase<MaxVectors>& seen,
                                           const float* alpha, bool first, float* out) {
  Tile<Dims, Vectors> tile;
  tile.clear();
  if constexpr (Stairs) {
    detail::multiply_down<0>(tile, v, v_stride, weights, lanes, seen);
  } else {
    tile.template multiply_add<0, Prefetch ? 16 : 0>(v, 1, v_stride, weights, lanes, seen.end[0]);
  }
  AUTOFA_UNROLL for (int i = 0; i < Dims; ++i) {
    AUTOFA_UNROLL for (int j = 0; j < Vectors; ++j) {
      float* to = out + i * lanes + j * kLanes;
      if (!first) tile.at[i][j] += cpu::load(to) * cpu::load(alpha + j * kLanes);
      cpu::store(to, tile.at[i][j]);
    }
  }
}

}  // namespace autofa::cpu_flash
