// The tunable constants of cpu.decode, checked once.
#pragma once

#include "autofa/abi.h"
#include "autofa/cpu/element.h"
#include "autofa/cpu/vector.h"

namespace autofa::cpu_decode {

using cpu::Floats;
using cpu::kLanes;

// `Params` names: dtype and isa (as in abi.h); tile_rows, the query rows that share one read of a
// key or value from cache; block_k, keys between two rescalings; split_k, keys of one task.
template <class Params>
struct Config {
  static constexpr int dtype = Params::dtype;
  static constexpr int isa = Params::isa;
  static constexpr int tile_rows = Params::tile_rows;
  static constexpr int64_t block_k = Params::block_k;
  static constexpr int64_t split_k = Params::split_k;
  // Rows of one task. More of them are bound by arithmetic, not by reading keys and values once.
  static constexpr int64_t max_rows = 32;
  // Below this many tasks keys are split further, into parts of at least block_k / 2.
  static constexpr int64_t enough_tasks = 16;
  using Element = cpu::Element<dtype>;
  using Type = typename Element::Type;

  // Vectors of output dims that are summed at a time: 8 cover the latency of the multiply-adds.
  static constexpr int tile_dims(int rows) { return kLanes / rows < 8 ? kLanes / rows : 8; }

  // How far ahead of the row in use keys and values are fetched: 2 KiB. 1 to 4 KiB measured alike;
  // several query rows, and rows of (B, N, H, D), gained 10-30 %.
  static int64_t rows_ahead(int64_t dims) {
    return 1 + 2048 / (dims * static_cast<int64_t>(sizeof(Type)));
  }

  static_assert(isa == (kLanes == 16 ? AUTOFA_V4 : AUTOFA_V3),
                "isa must be the instruction set that the library is compiled for");
  static_assert(dtype == AUTOFA_F32 || dtype == AUTOFA_F16 || dtype == AUTOFA_BF16);
  static_assert(kLanes % tile_rows == 0, "keys of a tile fill a vector");
  static_assert(block_k % kLanes == 0 && split_k % block_k == 0);
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace autofa::cpu_decode
