// The compile-time shape of one variant, and what it must satisfy.
#pragma once

#include "autofa/block/kv_ring.cuh"
#include "autofa/block/row_attention.cuh"

namespace autofa::share_kv {

template <class Params>
struct Config : RowShape<Params> {
  using Shape = RowShape<Params>;
  static constexpr int registers =
      Shape::other_registers + Shape::held_squares * Shape::m_tiles * 4;
  static_assert(registers <= 255, "output and scores of a warp's rows stay in its registers");
  static constexpr int blocks_per_sm = Shape::blocks_for(registers);

  using Queries = autofa::Queries<typename Shape::QTile, Shape::m_tiles, Shape::held_squares>;
  using Pipeline = KvRing<typename Shape::KTile, Shape::threads, Shape::head_dim, Params::stages>;
  static constexpr int smem_bytes = Shape::QTile::bytes + Pipeline::bytes;
};

}  // namespace autofa::share_kv
