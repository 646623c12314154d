// What passes through the ring of the families whose warps stand in rows and columns: for each key
// tile the slices of queries and keys, side by side in one slot, then the pieces of the values.
#pragma once

#include <cstdint>

#include "autofa/abi.h"
#include "autofa/block/column_attention.cuh"
#include "autofa/block/scheduler.cuh"
#include "autofa/block/tile.cuh"

namespace autofa {

// The config cuts the values into `value_pieces`, each a C::VTile that lies `piece_keys` keys and
// `piece_columns` columns behind the one before.
template <class C>
class SliceStream {
 public:
  static constexpr int pieces = C::slices + C::value_pieces;
  using VLoader = TileLoader<typename C::VTile, C::threads, C::head_dim>;

  __device__ __forceinline__ SliceStream(const autofa_params& call, const ColumnPlace<C>& place)
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
      const int i = piece - C::slices;
      values_.load(slot, first_key + i * C::piece_keys, place_.keys, i * C::piece_columns);
    }
  }

  __device__ __forceinline__ const VLoader& value_loader() const { return values_; }

 private:
  TileLoader<typename C::QTile, C::threads, C::head_dim> queries_;
  TileLoader<typename C::KTile, C::threads, C::head_dim> keys_;
  VLoader values_;
  const ColumnPlace<C>& place_;
};

}  // namespace autofa
