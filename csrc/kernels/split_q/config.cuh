// The compile-time shape of one variant, and what it must satisfy.
#pragma once

#include <algorithm>

#include "autofa/abi.h"
#include "autofa/arch/element.cuh"
#include "autofa/block/kv_pipeline.cuh"
#include "autofa/block/tile.cuh"

namespace autofa::split_q {

template <class Params>
struct Config {
  static constexpr int dtype = Params::dtype;
  static constexpr int causal = Params::causal;
  static constexpr int mask = Params::mask;
  static constexpr int accumulate = Params::accumulate;
  static constexpr int head_dim = Params::head_dim;
  static constexpr int block_m = Params::block_m;
  static constexpr int block_n = Params::block_n;
  static constexpr int threads = Params::warps * 32;
  static constexpr int rows_per_warp = block_m / Params::warps;
  static constexpr int columns = (head_dim + 15) / 16 * 16;  // the head dim, filled up with zeros

  static_assert(block_m % (16 * Params::warps) == 0, "each warp owns whole 16-row tiles");
  static_assert(block_n % 16 == 0, "p v consumes 16 keys at a time");

  static constexpr int m_tiles = rows_per_warp / 16;  // accumulator tiles of 16 x 8
  static constexpr int n_tiles = block_n / 8;
  static constexpr int o_tiles = columns / 8;
  // Registers of a thread: output and scores, 40 for addresses and row statistics as compiled, and
  // the queries, if there is room for them.
  static constexpr int other_registers = m_tiles * (columns + block_n) / 2 + 40;
  static constexpr int query_registers = m_tiles * columns / 4;
  static constexpr bool queries_fit = other_registers + query_registers <= 255;
  static constexpr int held_squares = queries_fit ? columns / 16 : 0;
  static constexpr int registers = other_registers + (queries_fit ? query_registers : 0);
  static_assert(registers <= 255, "output and scores of a warp's rows stay in its registers");
  static constexpr int blocks_per_sm = std::max(1, 65536 / (threads * registers));

  using Element = typename ElementOf<dtype>::type;
  using QTile = Tile<block_m, columns>;
  using KTile = Tile<block_n, columns>;
  using VTile = Tile<block_n, columns>;
  using Pipeline = KvPipeline<KTile, VTile, threads, head_dim, Params::stages>;
  static constexpr int smem_bytes = QTile::bytes + Pipeline::bytes;
};

}  // namespace autofa::split_q
