// The tunable constants of cpu.amx, and the layouts that all of it shares.
//
// Everything is made of squares of 32 x 32: a *unit* is 32 queries, a *group* 32 keys, a *chunk* 32
// head dims. A square of bf16 operands is two tiles, a square of sums four; all tiles are stored
// whole, one after the other, so each is 1 KB of contiguous memory.
#pragma once

#include <stdint.h>

#include "autofa/abi.h"
#include "autofa/cpu/vector.h"

namespace autofa::cpu_amx {

using cpu::Floats;
using cpu::kLanes;

constexpr int64_t kSide = 32;
// Elements of one stored tile: bf16 operands and f32 sums.
constexpr int64_t kOperandTile = 512;
constexpr int64_t kSumTile = 256;
constexpr int64_t kOperandSquare = 2 * kOperandTile;
constexpr int64_t kSumSquare = 4 * kSumTile;
constexpr int64_t kTileRowBytes = 64;

constexpr int64_t squares(int64_t length) { return (length + kSide - 1) / kSide; }

// Sums (row, column): row is a key of scores or a head dim of outputs, columns are 16 queries from
// `half` * 16 on.
constexpr int64_t sum_at(int64_t row, int half) {
  return row / kSide * kSumSquare + row % kSide / 16 * 2 * kSumTile + half * kSumTile +
         row % 16 * 16;
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// `Params` names: dtype (as in abi.h); block_q, queries of a task; block_k, keys whose weights are
// added to the outputs together.
template <class Params>
struct Config {
  static constexpr int dtype = Params::dtype;
  static constexpr int units = Params::block_q / kSide;
  static constexpr int groups = Params::block_k / kSide;

  static_assert(dtype == AUTOFA_BF16, "the tiles multiply bf16");
  static_assert(kLanes == 16, "needs AVX-512");
  static_assert(units >= 1 && units * kSide == Params::block_q);
  static_assert(groups >= 1 && groups * kSide == Params::block_k);
};

}  // namespace autofa::cpu_amx
