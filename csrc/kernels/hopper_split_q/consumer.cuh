// A consumer: one warpgroup that owns 64 query rows of a tile, with scores, weights and output in
// its registers.
//
// The scores of the next keys are multiplied out before the output of these, so that their softmax
// runs while the tensor cores work on the output. What is multiplied comes in chunks; one is always
// under way while the next is waited for, and the buffer of the one before is released.
#pragma once

#include "autofa/block/chunk_products.cuh"
#include "autofa/block/epilogue.cuh"
#include "autofa/block/mapped_call.cuh"
#include "autofa/block/scheduler.cuh"
#include "autofa/block/warpgroup_rows.cuh"
#include "config.cuh"
#include "row_softmax.cuh"
#include "tile_output.cuh"
#include "turns.cuh"

namespace autofa::hopper_split_q {

template <class C>
class Consumer {
  using Element = typename C::Element;
  static constexpr int squares = C::block_n / 16;

  // Of a tile's keys, rounded, in squares of 16: the left operand of p v.
  struct Weights {
    uint32_t packed[squares][4];
  };

 public:
  __device__ __forceinline__ Consumer(const MappedCall& mapped, const Memory<C>& memory, int index)
      : call_(mapped.call),
        memory_(memory),
        index_(index),
        rows_(static_cast<int>(call_.seqlen_q)),
        turns_(index),
        ring_(memory.ring()) {}

  __device__ __forceinline__ void run() {
    const SoftmaxScale scale(call_.scale);
    typename C::Queue queue(call_);
    TileBoardTurn board(memory_.board());
    turns_.begin();
    RowTile at;
#pragma unroll 1
    for (uint32_t index = board.read(); index != TileBoard::none; index = board.read()) {
      queue.seek(index, at);
      const typename C::Mask mask(call_, at.batch, at.head_q);
      const int first_row = at.first_row + index_ * 64;
      const KeyTiles of_block(mask, at.first_row, C::block_m, rows_, C::block_n);
      KeyTiles own(mask, first_row, 64, rows_, C::block_n);
      if (first_row >= rows_) own.end = 0;
      RowSoftmax softmax(scale.log2);
      if (of_block.end > 0) {
        mbarrier_wait(memory_.queries_full(index_), full_parity_);
        full_parity_ ^= 1;
        if (scale.negate_queries) {
          negate_elements(memory_.queries(index_), C::query_bytes, 1 + index_);
        }
      }
      if (own.end > 0) {
        attend(softmax, mask, own, of_block.end, first_row + row_of_thread());
        softmax.finish();
        store_tile<Element>(out_, softmax, mask, call_, at, first_row, own.end * C::block_n);
      } else {
        if (of_block.end > 0) release_queries();
        if (of_block.end > 0) {
          ring_.skip(C::chunks);
          skip_tiles(of_block.end - 1);
          ring_.skip(C::chunks);
        }
        store_rows_without_keys(call_, at, first_row, 0, static_cast<int>(call_.head_dim_v), true);
      }
    }
  }

 private:
  __device__ __forceinline__ void attend(RowSoftmax& softmax, const typename C::Mask& mask,
                                         const KeyTiles& tiles, int end_of_block, int row) {
    multiply_keys(false);
    wgmma_wait<0>();
    ring_.release();
    wgmma_landed(scores_[0]);
    if (tiles.end == 1) release_queries();
    hide(mask, tiles, row, 0);
    softmax.fit(scores_[0], owed_);
    RowSoftmax::Sums sums;
    weigh(softmax, sums, weights_[0]);
    if constexpr (C::weight_sets == 1) pack(weights_[0]);
    softmax.add(sums);
    owed_[0] = owed_[1] = 1.0f;  // there is no output yet

    const int others = end_of_block - tiles.end;  // tiles that only other warpgroups need
    const auto step = [&](int tile, const Weights& weights, Weights& next) {
      this->step(softmax, mask, tiles, row, tile, weights, next);
    };
    if constexpr (C::weight_sets == 1) {
#pragma unroll 1
      for (int tile = 0; tile + 1 < tiles.end; ++tile) step(tile, weights_[0], weights_[0]);
      finish(tiles.end, others, weights_[0]);
    } else {
      int tile = 0;
#pragma unroll 1
      for (; tile + 2 < tiles.end; tile += 2) {
        step(tile, weights_[0], weights_[1]);
        step(tile + 1, weights_[1], weights_[0]);
      }
      if (tile + 1 < tiles.end) {
        step(tile, weights_[0], weights_[1]);
        finish(tiles.end, others, weights_[1]);
      } else {
        finish(tiles.end, others, weights_[0]);
      }
    }
  }

  // Scores of the next tile, and the output of this one. With two sets of weights the next are
  // rounded while this tile's last product is under way, which then goes on beside the next scores;
  // with one they wait for it.
  __device__ __forceinline__ void step(RowSoftmax& softmax, const typename C::Mask& mask,
                                       const KeyTiles& tiles, int row, int tile,
                                       const Weights& weights, Weights& next) {
    turns_.wait();
    multiply_keys(tile > 0);
    if constexpr (C::weight_sets == 2) settle();
    for_each_chunk<C::chunks>([&](auto index) {
      constexpr int chunk = decltype(index)::value;
      multiply_values<chunk>(weights, tile > 0);
      if constexpr (chunk + 1 == C::chunks) turns_.pass();
      wgmma_wait<1>();
      ring_.release();
      if constexpr (chunk == 0) {
        wgmma_landed(scores_[0]);
        if (tile + 2 == tiles.end) release_queries();
      }
    });
    hide(mask, tiles, row, tile + 1);
    if constexpr (C::weight_sets == 2) {
      RowSoftmax::Sums sums;
#pragma unroll 1
      for (int round = 0; round < 2; ++round) {
        weigh(softmax, sums, next);
        if (!softmax.unfit(sums)) break;
        softmax.fit(scores_[0], owed_);
      }
      softmax.add(sums);
    } else {
      softmax.fit(scores_[0], owed_);
      RowSoftmax::Sums sums;
      weigh(softmax, sums, next);
      softmax.add(sums);
      // Never so; but a branch on the sums keeps the exponentials on this side of the wait, beside
      // the product that they are to hide behind. ptxas moves all of them beyond it otherwise.
      if (softmax.sum(0) + softmax.sum(1) < 0.0f) __trap();
      wgmma_wait<0>();
      ring_.release();
      settle();
      pack(next);
    }
  }

  // The output of the last tile.
  __device__ __forceinline__ void finish(int tiles, int others, const Weights& weights) {
    if constexpr (C::weight_sets == 2) {
      wgmma_wait<0>();
      if (tiles > 1) ring_.release();
      settle();
    }
    if (others > 0) {
      turns_.skip();
      ring_.skip(C::chunks);  // of the next tile: they come before these values
    }
    for_each_chunk<C::chunks>([&](auto index) {
      constexpr int chunk = decltype(index)::value;
      multiply_values<chunk>(weights, tiles > 1);
      if constexpr (chunk > 0) {
        wgmma_wait<1>();
        ring_.release();
      }
    });
    wgmma_wait<0>();
    ring_.release();
    wgmma_landed(out_);
    if (others > 0) {
      skip_tiles(others - 1);
      ring_.skip(C::chunks);
    }
  }

  // What only other warpgroups need: keys of a tile, and values of the one before. Turn by turn,
  // as the others wait for chunks that this one holds.
  __device__ __forceinline__ void skip_tiles(int tiles) {
#pragma unroll 1
    for (; tiles > 0; --tiles) {
      turns_.skip();
      ring_.skip(2 * C::chunks);
    }
  }

  // scores = q k^T of the next tile, of which the last chunk stays under way. With two sets of
  // weights a chunk of values may still be when it begins, which is done when it ends.
  __device__ __forceinline__ void multiply_keys(bool values_under_way) {
    for_each_chunk<C::chunks>([&](auto index) {
      constexpr int chunk = decltype(index)::value;
      constexpr int all = (C::head_dim + 15) / 16, most = C::groups_per_chunk * 4;
      constexpr int first = chunk * most;  // in steps of 16 columns
      constexpr int end = all - first < most ? all : first + most;
      multiply_key_chunk<Element, first, end, C::query_group_bytes, C::key_group_bytes>(
          scores_[0], memory_.queries(index_), ring_.take());
      if constexpr (chunk > 0) {
        wgmma_wait<1>();
        ring_.release();
      } else if constexpr (C::weight_sets == 2) {
        wgmma_wait<1>();
        if (values_under_way) ring_.release();
      }
    });
  }

  // out += p v of one chunk's keys, which stays under way.
  template <int Chunk>
  __device__ __forceinline__ void multiply_values(const Weights& weights, bool accumulate) {
    constexpr int count = C::keys_per_chunk / 16;
    multiply_value_chunk<Element, Chunk * count, count, C::value_group_bytes>(
        out_, weights.packed, ring_.take(), Chunk > 0 || accumulate);
  }

  __device__ __forceinline__ void hide(const typename C::Mask& mask, const KeyTiles& tiles, int row,
                                       int tile) {
    if (tile >= tiles.first_masked) mask.apply(scores_, row, tile * C::block_n);
  }

  // The tile's weights: with two sets into `next`, rounded, while the scores stay; with one in
  // place of the scores, to be rounded once no product under way reads the set.
  __device__ __forceinline__ void weigh(const RowSoftmax& softmax, RowSoftmax::Sums& sums,
                                        Weights& next) {
    sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll
    for (int n = 0; n < 2 * squares; ++n) {
      float weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[i] = softmax.weigh(scores_[0][n][i], i / 2, sums[i]);
        if constexpr (C::weight_sets == 1) {
          compute_here(weights[i]);
          scores_[0][n][i] = weights[i];
        }
      }
      if constexpr (C::weight_sets == 2) pack(next, n, weights);
    }
  }

  __device__ __forceinline__ void pack(Weights& weights) const {
#pragma unroll
    for (int n = 0; n < 2 * squares; ++n) pack(weights, n, scores_[0][n]);
  }
  __device__ __forceinline__ void pack(Weights& weights, int n, const float (&tile)[4]) const {
    weights.packed[n / 2][n % 2 * 2] = Element::pack(tile[0], tile[1]);
    weights.packed[n / 2][n % 2 * 2 + 1] = Element::pack(tile[2], tile[3]);
  }

  // Gives the output what it is owed, once no product into it is under way.
  __device__ __forceinline__ void settle() {
    if (!__any_sync(~0u, owed_[0] != 1.0f || owed_[1] != 1.0f)) return;
    wgmma_landed(out_);
#pragma unroll
    for (int n = 0; n < C::columns_v / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out_[n][i] *= owed_[i / 2];
    }
    owed_[0] = owed_[1] = 1.0f;
  }

  __device__ __forceinline__ void release_queries() const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(memory_.queries_free(index_));
  }

  const autofa_params& call_;
  const Memory<C> memory_;
  const int index_, rows_;
  const Turns<C::consumers, C::turns> turns_;
  typename C::Ring::Reader ring_;
  uint32_t full_parity_ = 0;
  float scores_[1][C::block_n / 8][4];
  float out_[C::columns_v / 8][4];
  Weights weights_[C::weight_sets];
  float owed_[2] = {1.0f, 1.0f};  // what the output is yet to be multiplied by, row by row
};

}  // namespace autofa::hopper_split_q
