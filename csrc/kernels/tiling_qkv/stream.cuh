// What passes through the ring: for each key tile the slices of queries and keys, side by side in
// one slot, then the slices of values.
#pragma once

#include <cstdint>

#include "autofa/abi.h"
#include "autofa/block/column_attention.cuh"
#include "autofa/block/scheduler.cuh"
#include "autofa/block/tile.cuh"

namespace autofa::tiling_qkv {

template <class C>
class Stream {
 public:
  static constexpr int pieces = 2 * C::slices;
  using VLoader = TileLoader<typename C::VTile, C::threads, C::head_dim>;

  __device__ __forceinline__ Stream(const autofa_params& call, const ColumnPlace<C>& place)
      : queries_(matrix_at(call.q, call.q_strides, place.work.batch, place.work.head_q),
                 call.q_strides[2]),
        keys_(matrix_at(call.k, call.k_strides, place.work.batch, place.work.head_kv),
              call.k_strides[2]),
        values_(matrix_at(call.v, call.v_strides, place.work.batch, place.work.head_kv),
                call.v_strides[2]),
        place_(place) {}

  __device__ __forceinline__ void load(uint32_t slot, int tile, int piece) const {
    if (tile >= place_.tiles.end) return;
    const int first_key = tile * C::block_n;
    if (piece < C::slices) {
      const int column = piece * C::slice;
      queries_.load(slot, place_.work.first_row, place_.rows, column);
      keys_.load(slot + C::QTile::bytes, first_key, place_.keys, column);
    } else {
      values_.load(slot, first_key, place_.keys, (piece - C::slices) * C::slice);
    }
  }

  __device__ __forceinline__ const VLoader& value_loader() const { return values_; }

 private:
  TileLoader<typename C::QTile, C::threads, C::head_dim> queries_;
  TileLoader<typename C::KTile, C::threads, C::head_dim> keys_;
  VLoader values_;
  const ColumnPlace<C>& place_;
};

}  // namespace autofa::tiling_qkv
