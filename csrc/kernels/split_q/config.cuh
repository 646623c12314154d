// The compile-time shape of one variant, and what it must satisfy.
#pragma once

#include "autofa/block/kv_pipeline.cuh"
#include "autofa/block/row_attention.cuh"

namespace autofa::split_q {

template <class Params>
struct Config : RowShape<Params> {
  using Shape = RowShape<Params>;
  // The queries go to registers if there is room for them: some to spare, as compiled.
  static constexpr bool queries_fit = Shape::other_registers + Shape::query_registers <= 248;
  static constexpr int held_squares = queries_fit ? Shape::columns / 16 : 0;
  static constexpr int registers =
      Shape::other_registers + (queries_fit ? Shape::query_registers : 0);
  static_assert(registers <= 255, "output and scores of a warp's rows stay in its registers");
  static constexpr int blocks_per_sm = Shape::blocks_for(registers);

  using Queries = autofa::Queries<typename Shape::QTile, Shape::m_tiles, held_squares>;
  using Pipeline = KvPipeline<typename Shape::KTile, typename Shape::VTile, Shape::threads,
                              Shape::head_dim, Params::stages>;
  static constexpr int smem_bytes = Shape::QTile::bytes + Pipeline::bytes;
};

}  // namespace autofa::split_q
