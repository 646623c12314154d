// What the families have in common of which warps stand in rows and columns: those of a row share
// its queries, score a part of the keys each, exchange the weights, and then accumulate a part of
// the output's columns. Queries, keys and values come in pieces through a SlotRing.
#pragma once

#include <algorithm>
#include <cstdint>

#include "autofa/abi.h"
#include "autofa/arch/element.cuh"
#include "autofa/block/column_epilogue.cuh"
#include "autofa/block/exchange.cuh"
#include "autofa/block/mask.cuh"
#include "autofa/block/nonfinite.cuh"
#include "autofa/block/scheduler.cuh"
#include "autofa/block/slice_products.cuh"
#include "autofa/block/softmax.cuh"
#include "autofa/block/tile.cuh"

namespace autofa {

// The compile-time shape of such a variant, and what it must satisfy.
template <class Params>
struct ColumnShape {
  static constexpr int dtype = Params::dtype;
  static constexpr int causal = Params::causal;
  static constexpr int mask = Params::mask;
  static constexpr int accumulate = Params::accumulate;
  static constexpr int head_dim = Params::head_dim;
  static constexpr int block_m = Params::block_m;
  static constexpr int block_n = Params::block_n;
  static constexpr int column_warps = Params::column_warps;
  static constexpr int row_warps = Params::warps / column_warps;
  static constexpr int threads = Params::warps * 32;
  static constexpr int stages = Params::stages;

  static_assert(Params::warps % column_warps == 0, "row warps x column warps");
  static_assert(block_m % (16 * row_warps) == 0, "each warp owns whole 16-row tiles");
  static_assert(block_n % (16 * column_warps) == 0, "each warp scores whole 16-key tiles");

  static constexpr int rows_per_warp = block_m / row_warps;
  static constexpr int keys_per_warp = block_n / column_warps;
  static constexpr int m_tiles = rows_per_warp / 16;  // accumulator tiles of 16 x 8
  static constexpr int n_tiles = keys_per_warp / 8;
  // Slices of the head dim in q k^T. The last is filled up with zeros.
  static constexpr int slice = Params::slice;
  static constexpr int slices = (head_dim + slice - 1) / slice;

  static constexpr int round_up(int count, int unit) { return (count + unit - 1) / unit * unit; }

  // Blocks of an SM that the registers are enough for, with `v_cols` columns of output: output,
  // scores, the weights where they stay in registers, and what statistics, operands and addresses
  // took as compiled.
  static constexpr int blocks_for(int v_cols) {
    const int sums = m_tiles * (v_cols / column_warps + keys_per_warp) / 2;
    const int weights = column_warps == 1 ? m_tiles * keys_per_warp / 4 : 0;
    return std::max(1, 65536 / (threads * (sums + weights + 64)));
  }

  using Element = typename ElementOf<dtype>::type;
  using Mask = KeyMask<causal, mask>;
  using QTile = Tile<block_m, slice>;
  using KTile = Tile<block_n, slice>;
  template <bool Gathered>
  using WeightsIn = Weights<Element, row_warps, column_warps, m_tiles, n_tiles, Gathered>;
  using Exchange = RowExchange<row_warps, column_warps, m_tiles>;
};

// Where a block and a thread stand in a call.
template <class C>
struct ColumnPlace {
  BlockWork work;
  int rows, keys;
  typename C::Mask mask;
  KeyTiles tiles;
  WarpPlace<C::column_warps> warp;
  int row;  // the thread's first row

  __device__ __forceinline__ explicit ColumnPlace(const autofa_params& call)
      : work(call, C::block_m),
        rows(static_cast<int>(call.seqlen_q)),
        keys(static_cast<int>(call.seqlen_k)),
        mask(call, work.batch, work.head_q),
        tiles(mask, work.first_row, C::block_m, rows, C::block_n),
        row(work.first_row + warp.row * C::rows_per_warp + static_cast<int>(threadIdx.x) % 32 / 4) {
  }
};

// Scores, softmax and output of a warp's rows: its part of the keys, its part of the columns.
template <class C>
class ColumnAttention {
  using Element = typename C::Element;

 public:
  // Exchanges take place in `shared`, C::Weights::bytes + C::Exchange::bytes long.
  __device__ __forceinline__ ColumnAttention(const ColumnPlace<C>& place, float scale,
                                             uint32_t shared)
      : place_(place),
        scale_(place.mask.softmax_scale(scale)),
        softmax_(scale_.log2, C::accumulate == AUTOFA_F32 ? 8.0f : 0.0f),
        weights_(shared),
        exchange_(shared + C::Weights::bytes) {}

  // Adds to the scores of a key tile over one slice of the head dim. `slot` has the queries' and
  // behind it the keys'.
  __device__ __forceinline__ void add_qk(uint32_t slot) {
    add_qk_slice<Element, typename C::QTile, typename C::KTile, C::accumulate>(
        scores_, slot, slot + C::QTile::bytes, place_.warp.row * C::rows_per_warp,
        place_.warp.column * C::keys_per_warp);
  }

  // From the scores of a key tile, once all slices were added, to its weights. A barrier comes
  // next, then gather_weights(), then add_pv().
  __device__ __forceinline__ void weigh(int tile) {
    if (scale_.negate_queries) negate(scores_);
    if (masks(tile)) {
      place_.mask.apply(scores_, place_.row,
                        tile * C::block_n + place_.warp.column * C::keys_per_warp);
    }
    fit_shared(softmax_, scores_, out_, exchange_);
#pragma unroll
    for (int square = 0; square < C::n_tiles / 2; ++square) {
      softmax_.weigh(scores_, square);
      weights_.put(scores_, square);
    }
    clear_sums(scores_);
  }

  __device__ __forceinline__ void gather_weights() { weights_.gather(); }

  // Adds weights times values for a piece of the values in `slot`: its keys from `first_key` of the
  // key tile on, its columns from `first_col` on.
  template <class VTile, class Loader>
  __device__ __forceinline__ void add_pv(uint32_t slot, const Loader& loader, int tile,
                                         int first_key, int first_col) {
    const int first_tile = first_col / (8 * C::column_warps);
    if constexpr (C::Mask::hides_values) {
      if (masks(tile)) {
        isolate_nonfinite<Element, VTile, C::column_warps>(
            out_, loader, slot, place_.mask, place_.row, tile * C::block_n + first_key, first_tile,
            place_.warp.column);
      }
    }
    if constexpr (C::accumulate == AUTOFA_F32) {
      add_pv_piece<Element, VTile, C::column_warps>(out_, weights_, first_key / 16, first_tile,
                                                    slot, place_.warp.column);
    } else {
      add_pv_piece_in_f16<Element, VTile, C::column_warps>(out_, weights_, first_key / 16,
                                                           first_tile, slot, place_.warp.column);
    }
  }

  // Writes the results.
  __device__ __forceinline__ void store(const autofa_params& call) {
    const BlockWork& work = place_.work;
    finish_shared(softmax_, exchange_);
    store_columns<Element, C::head_dim, C::column_warps>(
        out_, softmax_, matrix_at(call.out, call.out_strides, work.batch, work.head_q),
        call.out_strides[2], place_.row, place_.rows, place_.warp.column);
    if (call.lse != nullptr && place_.warp.column == 0) {
      const int64_t sequence = work.batch * call.heads_q + work.head_q;
      store_row_log_sums(softmax_, call.lse + sequence * place_.rows, place_.row, place_.rows);
    }
  }

 private:
  __device__ __forceinline__ bool masks(int tile) const {
    return C::Mask::on_every_tile || tile >= place_.tiles.first_masked;
  }

  const ColumnPlace<C>& place_;
  const SoftmaxScale scale_;
  OnlineSoftmax<C::m_tiles> softmax_;
  typename C::Weights weights_;
  const typename C::Exchange exchange_;
  float scores_[C::m_tiles][C::n_tiles][4] = {};
  float out_[C::m_tiles][C::o_tiles][4] = {};
};

}  // namespace autofa
