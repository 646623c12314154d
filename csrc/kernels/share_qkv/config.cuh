// The compile-time shape of one variant, and what it must satisfy.
#pragma once

#include <algorithm>

#include "autofa/block/kv_ring.cuh"
#include "autofa/block/row_attention.cuh"

namespace autofa::share_qkv {

template <class Params>
struct Config : RowShape<Params> {
  using Shape = RowShape<Params>;
  static constexpr int registers = Shape::other_registers + Shape::query_registers;
  static_assert(registers <= 255, "queries, output and scores of a warp's rows are in registers");
  static constexpr int blocks_per_sm = Shape::blocks_for(registers);

  using Queries = autofa::Queries<typename Shape::QTile, Shape::m_tiles, Shape::columns / 16>;
  using Pipeline = KvRing<typename Shape::KTile, Shape::threads, Shape::head_dim, Params::stages>;
  static constexpr int smem_bytes = std::max(Shape::QTile::bytes, Pipeline::bytes);
};

}  // namespace autofa::share_qkv
