// Register tiles of the two products, for a few query rows: keys and values stream through once.
//
// Vector lanes run along the head dim, as keys and values lie in memory; the sums of kLanes pairs
// of row and key are then folded into one vector of scores.
#pragma once

#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "autofa/cpu/reduce.h"
#include "config.h"

namespace autofa::cpu_decode {

template <int Value>
using Constant = std::integral_constant<int, Value>;

// Cuts [first, count) into tiles of Size and its halves: f(Constant<size>, first).
template <int Size, class F>
inline void for_each_tile(int64_t first, int64_t count, F&& f) {
  for (; first + Size <= count; first += Size) f(Constant<Size>(), first);
  if constexpr (Size > 1) for_each_tile<Size / 2>(first, count, f);
}

// The same with the fewest tiles: the last may reach beyond `count`, if more than half of it does
// not.
template <int Size, class F>
inline void for_fewest_tiles(int64_t first, int64_t count, F&& f) {
  for (; 2 * (count - first) > Size; first += Size) f(Constant<Size>(), first);
  if constexpr (Size > 1) for_fewest_tiles<Size / 2>(first, count, f);
}

// Where the last of the fewest tiles ends: rows up to there are read and written.
template <int Size>
inline int64_t end_of_tiles(int64_t count) {
  int64_t end = 0;
  for_fewest_tiles<Size>(0, count, [&](auto size, int64_t first) { end = first + size; });
  return end;
}

// Fetches `count` elements into the cache; they may lie outside of any tensor.
template <class Type>
inline void fetch(const Type* from, int64_t count) {
  constexpr int64_t line = 64 / sizeof(Type);
  for (int64_t i = 0; i < count; i += line) __builtin_prefetch(from + i);
}

// scores(row, key) for `Rows` rows and all `keys` of a block. Query rows are `dims` floats rounded
// up to whole vectors, zeros behind; scores of up to kLanes further keys are overwritten.
template <class Config, int Rows>
__attribute__((noinline)) void score_block(const float* q, int64_t q_stride,
                                           const typename Config::Type* k, int64_t k_stride,
                                           int64_t dims, int64_t keys, float* scores,
                                           int64_t scores_stride) {
  constexpr int tile_keys = kLanes / Rows;
  const int64_t ahead = Config::rows_ahead(dims) * k_stride;
  for (int64_t key = 0; key < keys; key += tile_keys) {
    const typename Config::Type* row[tile_keys];
    AUTOFA_UNROLL for (int j = 0; j < tile_keys; ++j) {
      row[j] = k + (key + j < keys ? key + j : keys - 1) * k_stride;
    }
    Floats sum[kLanes];
    AUTOFA_UNROLL for (int i = 0; i < kLanes; ++i) sum[i] = Floats{};
    const auto add = [&](int64_t d, auto load) {
      Floats left[Rows];
      AUTOFA_UNROLL for (int r = 0; r < Rows; ++r) left[r] = cpu::load(q + r * q_stride + d);
      AUTOFA_UNROLL for (int j = 0; j < tile_keys; ++j) {
        const Floats right = load(row[j] + d);
        AUTOFA_UNROLL for (int r = 0; r < Rows; ++r) sum[r * tile_keys + j] += left[r] * right;
      }
    };
    int64_t d = 0;
    // A single row leaves the reading to the hardware, which is then faster alone.
    if constexpr (Rows > 1) {
      AUTOFA_UNROLL for (int j = 0; j < tile_keys; ++j) fetch(row[j] + ahead, dims);
    }
    for (; d + kLanes <= dims; d += kLanes) add(d, Config::Element::load);
    if (d < dims) {
      add(d, [&](const typename Config::Type* from) {
        return cpu::load_part<Config::dtype>(from, dims - d);
      });
    }
    const Floats totals = cpu::sums_of_lanes(sum);
    AUTOFA_UNROLL for (int r = 0; r < Rows; ++r) {
      memcpy(scores + r * scores_stride + key,
             reinterpret_cast<const float*>(&totals) + r * tile_keys, tile_keys * sizeof(float));
    }
  }
}

// out(row, dim) = out * alpha + weights V for `Rows` rows and `Vectors` vectors of output dims,
// over the keys of a block. The last vector has `width` dims. The sum of a block starts from zero
// and is added to the rest at its end, which bounds the rounding error of long sums.
template <class Config, int Rows, int Vectors>
__attribute__((noinline)) void output_block(const float* weights, int64_t weights_stride,
                                            const typename Config::Type* v, int64_t v_stride,
                                            int64_t width, int64_t rows_ahead, int64_t keys,
                                            const float* alpha, float* out, int64_t out_stride) {
  const int64_t ahead = rows_ahead * v_stride;
  Floats sum[Rows][Vectors];
  AUTOFA_UNROLL for (int r = 0; r < Rows; ++r) {
    AUTOFA_UNROLL for (int j = 0; j < Vectors; ++j) sum[r][j] = Floats{};
  }
  const auto add = [&](int64_t key, auto load) {
    Floats right[Vectors];
    fetch(v + key * v_stride + ahead, Vectors * kLanes);
    AUTOFA_UNROLL for (int j = 0; j < Vectors; ++j) {
      right[j] = load(v + key * v_stride + j * kLanes);
    }
    AUTOFA_UNROLL for (int r = 0; r < Rows; ++r) {
      const Floats left = cpu::broadcast(weights[r * weights_stride + key]);
      AUTOFA_UNROLL for (int j = 0; j < Vectors; ++j) sum[r][j] += left * right[j];
    }
  };
  if (Vectors > 1 || width == kLanes) {
    for (int64_t key = 0; key < keys; ++key) add(key, Config::Element::load);
  } else {
    for (int64_t key = 0; key < keys; ++key) {
      add(key, [&](const typename Config::Type* from) {
        return cpu::load_part<Config::dtype>(from, width);
      });
    }
  }
  AUTOFA_UNROLL for (int r = 0; r < Rows; ++r) {
    AUTOFA_UNROLL for (int j = 0; j < Vectors; ++j) {
      float* to = out + r * out_stride + j * kLanes;
      cpu::store(to, cpu::load(to) * alpha[r] + sum[r][j]);
    }
  }
}

}  // namespace autofa::cpu_decode
