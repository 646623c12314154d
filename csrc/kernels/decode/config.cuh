// The compile-time shape of one variant, and what it must satisfy.
#pragma once

#include <algorithm>

#include "autofa/abi.h"
#include "autofa/arch/element.cuh"

namespace autofa::decode {

// Rows of 16-bit elements, each followed by 16 bytes that are not used: an odd number of 16-byte
// chunks, so that ldmatrix meets no bank conflicts, and fragments lie at constant distances.
template <int Rows, int Cols>
struct PaddedTile {
  static_assert(Rows % 16 == 0 && Cols % 16 == 0, "mma reads 16x16 squares");
  static constexpr int rows = Rows;
  static constexpr int cols = Cols;
  static constexpr int panel_cols = 16;
  static constexpr int row_chunks = panel_cols / 8;
  static constexpr int panel_bytes = panel_cols * 2;
  static constexpr int row_bytes = Cols * 2 + 16;
  static constexpr int bytes = Rows * row_bytes;

  static __device__ __forceinline__ constexpr uint32_t offset(int row, int chunk) {
    return row * row_bytes + chunk * 16;
  }
};

template <class Params>
struct Config {
  static constexpr int dtype = Params::dtype;
  static constexpr int causal = Params::causal;
  static constexpr int mask = Params::mask;
  static constexpr int head_dim = Params::head_dim;
  static constexpr int block_m = Params::block_m;
  static constexpr int block_n = Params::block_n;
  static constexpr int key_warps = Params::key_warps;
  static constexpr int column_warps = Params::column_warps;
  static constexpr int stages = Params::stages;
  static constexpr int warps = key_warps * column_warps;
  static constexpr int threads = warps * 32;

  // What a warp sees: all rows, its keys of a tile, its columns of the head dim, filled up with
  // zeros.
  static constexpr int keys = block_n / key_warps;
  static constexpr int columns = ((head_dim + column_warps - 1) / column_warps + 15) / 16 * 16;
  static constexpr int m_tiles = block_m / 16;
  static constexpr int n_tiles = keys / 8;
  static constexpr int o_tiles = columns / 8;
  static constexpr int squares = columns / 16;
  static constexpr bool whole_columns = columns * column_warps == head_dim;
  static_assert(block_m % 16 == 0 && block_n % (16 * key_warps) == 0, "mma reads 16x16 squares");
  static_assert(stages >= 1 && key_warps < 16, "a buffer, and a barrier per key warp");

  using Element = typename ElementOf<dtype>::type;
  using KvTile = PaddedTile<keys, columns>;

  // Output, queries and scores, and what statistics, operands and addresses took as compiled.
  static constexpr int registers =
      m_tiles * (columns * 3 / 4 + keys / 2) + 48 + (mask == AUTOFA_MASK_NONE ? 12 : 24) * m_tiles;
  static_assert(registers <= 255, "output, queries and scores stay in a warp's registers");

  static constexpr int fragment_bytes = 32 * 16;  // a 16x8 tile in f32: four words of each lane
  static constexpr int ring_bytes = 2 * stages * KvTile::bytes;           // of a warp
  static constexpr int score_bytes = m_tiles * n_tiles * fragment_bytes;  // of a warp
  static constexpr int exchange_bytes = column_warps > 1 ? 2 * warps * score_bytes : 0;
  static constexpr int merge_bytes =
      key_warps > 1 ? warps * m_tiles * o_tiles * fragment_bytes + key_warps * block_m * 4 : 0;
  static constexpr int smem_bytes = std::max(warps * ring_bytes + exchange_bytes, merge_bytes);

  // Blocks that registers and the largest shared memory of an SM are enough for.
  static constexpr int blocks_per_sm =
      std::max(1, std::min(65536 / (threads * (registers + 32)), 228 * 1024 / (smem_bytes + 1024)));
};

}  // namespace autofa::decode
