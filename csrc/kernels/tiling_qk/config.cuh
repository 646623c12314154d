// The compile-time shape of one variant, and what it must satisfy.
#pragma once

#include <algorithm>

#include "autofa/block/column_attention.cuh"
#include "autofa/block/tile.cuh"

namespace autofa::tiling_qk {

template <class Params>
struct Config : ColumnShape<Params> {
  using Shape = ColumnShape<Params>;
  static_assert(Params::block_n % Params::v_keys == 0, "whole chunks of values");
  // The values pass some keys at a time.
  static constexpr int value_pieces = Params::block_n / Params::v_keys;
  static constexpr int piece_keys = Params::v_keys;
  static constexpr int piece_columns = 0;
  // The output's columns, which the column warps share evenly.
  static constexpr int v_cols = Shape::round_up(Shape::head_dim, 16 * Shape::column_warps);
  static constexpr int o_tiles = v_cols / Shape::column_warps / 8;
  static constexpr int blocks_per_sm = Shape::blocks_for(v_cols);

  using VTile = Tile<piece_keys, v_cols>;
  using Weights = typename Shape::template WeightsIn<false>;
  static constexpr int slot_bytes =
      std::max(Shape::QTile::bytes + Shape::KTile::bytes, VTile::bytes);
  static constexpr int smem_bytes =
      Shape::stages * slot_bytes + Weights::bytes + Shape::Exchange::bytes;
};

}  // namespace autofa::tiling_qk
