// The compile-time shape of one variant, and what it must satisfy.
#pragma once

#include <algorithm>

#include "autofa/block/kv_pipeline.cuh"
#include "autofa/block/row_attention.cuh"
#include "merge.cuh"

namespace autofa::split_kv {

// What a warp sees: as if there were row warps only, and tiles of its own keys.
template <class Params>
struct Seen : Params {
  static_assert(Params::warps % Params::key_warps == 0, "row warps times key warps are all warps");
  static_assert(Params::block_n % Params::key_warps == 0, "each warp has its own keys");
  static constexpr int warps = Params::warps / Params::key_warps;
  static constexpr int block_n = Params::block_n / Params::key_warps;
};

// Some rows of a tile, from any multiple of 8 on: they lie as in the whole.
template <class Tile, int Rows>
struct TilePart : Tile {
  static constexpr int rows = Rows;
};

template <class Params>
struct Config : RowShape<Seen<Params>> {
  using Shape = RowShape<Seen<Params>>;
  static constexpr int block_n = Params::block_n;
  static constexpr int threads = Params::warps * 32;
  static constexpr int key_warps = Params::key_warps;
  static constexpr int keys_per_warp = Shape::block_n;

  // As compiled, a share of the keys costs 8 registers more per row tile. The queries go to
  // registers if there is room for them; warps of one row tile also hold a part.
  static constexpr int other_registers = Shape::other_registers + 8 * Shape::m_tiles;
  static constexpr int squares = Shape::columns / 16;
  static constexpr int held_squares =
      Shape::m_tiles == 1 ? std::min(squares, std::max(0, 232 - other_registers) / 4)
      : other_registers + Shape::query_registers <= 240 ? squares
                                                        : 0;
  static constexpr int registers = other_registers + 4 * Shape::m_tiles * held_squares;
  static_assert(registers <= 255, "output and scores of a warp's rows stay in its registers");
  static constexpr int blocks_per_sm = std::max(1, Shape::blocks_for(registers + 8) / key_warps);

  using KTile = Tile<block_n, Shape::columns>;
  using VTile = Tile<block_n, Shape::columns>;
  using KPart = TilePart<KTile, keys_per_warp>;
  using VPart = TilePart<VTile, keys_per_warp>;
  using QLoader = TileLoader<typename Shape::QTile, threads, Shape::head_dim>;
  using Queries = autofa::Queries<typename Shape::QTile, Shape::m_tiles, held_squares>;
  using Pipeline = KvPipeline<KTile, VTile, threads, Shape::head_dim, Params::stages>;
  using Merge = MergeShape<Params::warps / key_warps, key_warps, Shape::m_tiles, Shape::o_tiles>;

  // The results are merged where queries, keys and values were.
  static constexpr int smem_bytes =
      std::max(Shape::QTile::bytes + Pipeline::bytes, Merge::least_bytes);
};

}  // namespace autofa::split_kv
