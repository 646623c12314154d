// What the families have in common of which each warp owns query rows: it sees all their keys, so
// that scores, weights and output never leave its registers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "autofa/abi.h"
#include "autofa/arch/element.cuh"
#include "autofa/block/epilogue.cuh"
#include "autofa/block/fragments.cuh"
#include "autofa/block/mask.cuh"
#include "autofa/block/nonfinite.cuh"
#include "autofa/block/scheduler.cuh"
#include "autofa/block/softmax.cuh"
#include "autofa/block/tile.cuh"

namespace autofa {

// The compile-time shape of such a variant, and what it must satisfy.
template <class Params>
struct RowShape {
  static constexpr int dtype = Params::dtype;
  static constexpr int causal = Params::causal;
  static constexpr int mask = Params::mask;
  static constexpr int accumulate = Params::accumulate;
  static constexpr int head_dim = Params::head_dim;
  static constexpr int block_m = Params::block_m;
  static constexpr int block_n = Params::block_n;
  static constexpr int threads = Params::warps * 32;
  static constexpr int rows_per_warp = block_m / Params::warps;
  static constexpr int columns = (head_dim + 15) / 16 * 16;  // the head dim, filled up with zeros

  static_assert(block_m % (16 * Params::warps) == 0, "each warp owns whole 16-row tiles");
  static_assert(block_n % 16 == 0, "p v consumes 16 keys at a time");

  static constexpr int m_tiles = rows_per_warp / 16;  // accumulator tiles of 16 x 8
  static constexpr int n_tiles = block_n / 8;
  static constexpr int o_tiles = columns / 8;
  // Registers of a thread: output and scores; what row statistics, operands, addresses and applying
  // an explicit mask took as compiled; and the queries, where they are held too.
  static constexpr int other_registers = m_tiles * (columns + block_n) / 2 + 32 + 12 * m_tiles +
                                         (mask == AUTOFA_MASK_NONE ? 0 : 11 * m_tiles);
  static constexpr int query_registers = m_tiles * columns / 4;

  // How many squares of the queries go to registers where that is free to choose: all if there is
  // room, with some to spare. Warps of one row tile hold a part of what does not fit, which gained
  // 7% at head dim 256 on an H200; for two tiles that is too tight.
  static constexpr int all_held = other_registers + query_registers;
  static constexpr int held_squares = all_held <= (m_tiles == 1 ? 240 : 248) ? columns / 16
                                      : m_tiles == 1 ? std::max(0, 232 - other_registers) / 4
                                                     : 0;

  // Blocks that an SM's registers are enough for: the estimate is some short on some architectures,
  // and an explicit mask is applied with few registers if it must be, but not well.
  static constexpr int blocks_for(int registers) {
    const int wanted = registers + (mask == AUTOFA_MASK_NONE ? 8 : 24);
    return std::max(1, 65536 / (threads * wanted));
  }

  using Element = typename ElementOf<dtype>::type;
  using Mask = KeyMask<causal, mask>;
  using QTile = Tile<block_m, columns>;
  using KTile = Tile<block_n, columns>;
  using VTile = Tile<block_n, columns>;
  using QLoader = TileLoader<QTile, threads, head_dim>;
};

// Where a block and a thread stand in a call.
template <class C>
struct RowPlace {
  BlockWork work;
  int rows, keys;
  typename C::Mask mask;
  KeyTiles tiles;
  int warp_row;  // the warp's first row, from the block's
  int row;       // the thread's first row

  __device__ __forceinline__ explicit RowPlace(const autofa_params& call)
      : work(call, C::block_m),
        rows(static_cast<int>(call.seqlen_q)),
        keys(static_cast<int>(call.seqlen_k)),
        mask(call, work.batch, work.head_q),
        tiles(mask, work.first_row, C::block_m, rows, C::block_n),
        warp_row(static_cast<int>(threadIdx.x) / 32 * C::rows_per_warp),
        row(work.first_row + warp_row + static_cast<int>(threadIdx.x) % 32 / 4) {}

  __device__ __forceinline__ typename C::QLoader query_loader(const autofa_params& call) const {
    return {matrix_at(call.q, call.q_strides, work.batch, work.head_q), call.q_strides[2]};
  }

  // The pipeline of the keys and values that the block's rows need, with buffers at `shared`.
  __device__ __forceinline__ typename C::Pipeline pipeline(const autofa_params& call,
                                                           uint32_t shared) const {
    return {shared,
            matrix_at(call.k, call.k_strides, work.batch, work.head_kv),
            call.k_strides[2],
            matrix_at(call.v, call.v_strides, work.batch, work.head_kv),
            call.v_strides[2],
            keys,
            tiles.end};
  }
};

// Softmax and output of a warp's rows.
template <class C>
class RowAttention {
 public:
  __device__ __forceinline__ RowAttention(const RowPlace<C>& place, float scale_log2)
      : place_(place), softmax_(scale_log2, C::accumulate == AUTOFA_F32 ? 8.0f : 0.0f) {}

  // Takes in the keys and values of one tile, as they come out of the pipeline.
  template <class Queries, class Pipeline>
  __device__ __forceinline__ void absorb(const Queries& queries, Pipeline& pipeline, int tile) {
    using Element = typename C::Element;
    const bool masked = C::Mask::on_every_tile || tile >= place_.tiles.first_masked;
    const int first_key = tile * C::block_n;
    float scores[C::m_tiles][C::n_tiles][4];
    multiply_qk<Element, typename C::KTile, C::accumulate>(scores, queries, pipeline.keys(tile));
    const uint32_t values = pipeline.values(tile);
    if (masked) place_.mask.apply(scores, place_.row, first_key);
    softmax_.fit(scores, out_);
    if constexpr (C::Mask::hides_values) {
      if (masked) {
        isolate_nonfinite<Element, typename C::VTile>(out_, pipeline.value_loader(), values,
                                                      place_.mask, place_.row, first_key);
      }
    }
    accumulate_pv<Element, typename C::VTile, C::accumulate>(
        out_, scores, values, [&](int k) { softmax_.weigh(scores, k); });
  }

  // Writes the results. The warp's own rows of the tile at `staging` serve it on the way.
  __device__ __forceinline__ void store(const autofa_params& call, uint32_t staging) {
    const BlockWork& work = place_.work;
    softmax_.finish();
    store_output<typename C::Element, typename C::QTile, C::head_dim>(
        out_, softmax_, staging, place_.warp_row,
        matrix_at(call.out, call.out_strides, work.batch, work.head_q), call.out_strides[2],
        work.first_row, place_.rows);
    if (call.lse != nullptr) {
      const int64_t sequence = work.batch * call.heads_q + work.head_q;
      store_log_sums(softmax_, call.lse + sequence * place_.rows, place_.warp_row, work.first_row,
                     place_.rows);
    }
  }

 private:
  const RowPlace<C>& place_;
  OnlineSoftmax<C::m_tiles> softmax_;
  float out_[C::m_tiles][C::o_tiles][4] = {};
};

}  // namespace autofa
