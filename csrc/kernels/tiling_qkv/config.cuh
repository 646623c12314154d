// The compile-time shape of one variant, and what it must satisfy.
#pragma once

#include "autofa/block/column_attention.cuh"
#include "autofa/block/tile.cuh"

namespace autofa::tiling_qkv {

template <class Params>
struct Config : ColumnShape<Params> {
  using Shape = ColumnShape<Params>;
  static_assert(Shape::slice % (16 * Shape::column_warps) == 0, "shared evenly by column warps");
  // The values pass some columns at a time.
  static constexpr int value_pieces = Shape::slices;
  static constexpr int piece_keys = 0;
  static constexpr int piece_columns = Shape::slice;
  // The head dim as output columns.
  static constexpr int v_cols = Shape::slices * Shape::slice;
  static constexpr int o_tiles = v_cols / Shape::column_warps / 8;
  static constexpr int blocks_per_sm = Shape::blocks_for(v_cols);

  // Every slice of the values needs all weights of the tile: they stay in registers where there is
  // room. The scores are over by then.
  static constexpr int weight_registers = Shape::m_tiles * Shape::block_n / 4;
  static constexpr bool gathered = Shape::m_tiles * o_tiles * 4 + weight_registers <= 176;
  using Weights = typename Shape::template WeightsIn<gathered>;
  using VTile = Tile<Shape::block_n, Shape::slice>;
  static constexpr int slot_bytes = Shape::QTile::bytes + Shape::KTile::bytes;
  static constexpr int smem_bytes =
      Shape::stages * slot_bytes + Weights::bytes + Shape::Exchange::bytes;
};

}  // namespace autofa::tiling_qkv
