// A consumer: one warpgroup that owns 64 query rows of a tile together with the same warpgroup of
// the cluster's other block, with scores, weights and its columns of the output in registers.
//
// A step takes its keys in two halves, of which each block has the scores of one. The scores of the
// next step are multiplied out before the output of this one, so that their softmax runs while the
// tensor cores work on the output. What is multiplied comes in chunks; one is always under way
// while the next is waited for, and the buffer of the one before is released.
#pragma once

#include "autofa/block/chunk_products.cuh"
#include "autofa/block/fragment_store.cuh"
#include "autofa/block/mapped_call.cuh"
#include "autofa/block/pair_exchange.cuh"
#include "autofa/block/stored_repair.cuh"
#include "autofa/block/warpgroup_rows.cuh"
#include "autofa/block/wide_value_product.cuh"
#include "config.cuh"

namespace autofa::hopper_cluster_split_d {

template <class C>
class Consumer {
  using Element = typename C::Element;
  static constexpr int squares = C::keys_per_half / 16;
  static constexpr int squares_per_chunk = C::keys_per_chunk / 16;

  // Of a half's keys, rounded, in squares of 16: the left operand of p v.
  using Weights = uint32_t[squares][4];

 public:
  __device__ __forceinline__ Consumer(const MappedCall& mapped, const Memory<C>& memory, int index,
                                      int rank)
      : call_(mapped.call),
        memory_(memory),
        index_(index),
        rank_(rank),
        rows_(static_cast<int>(call_.seqlen_q)),
        ring_(memory.ring()),
        exchange_(memory.exchange(index), memory.exchange_barriers(index),
                  static_cast<uint32_t>(1 - rank)) {}

  __device__ __forceinline__ void run() {
    const SoftmaxScale scale(call_.scale);
    typename C::Queue queue(call_, blockIdx.x / kRanks, gridDim.x / kRanks);
    RowTile at;
#pragma unroll 1
    while (queue.next(at)) {
      const typename C::Mask mask(call_, at.batch, at.head_q);
      const int first_row = at.first_row + index_ * 64;
      const Halves loaded{KeyTiles(mask, at.first_row, C::block_m, rows_, C::keys_per_half).end};
      KeyTiles own(mask, first_row, 64, rows_, C::keys_per_half);
      if (first_row >= rows_) own.end = 0;
      if (loaded.end > 0) {
        mbarrier_wait(memory_.queries_full(index_), full_parity_);
        full_parity_ ^= 1;
        if (scale.negate_queries) {
          negate_elements(memory_.queries(index_), C::query_bytes, 1 + index_);
        }
      }
      if (own.end > 0) {
        PairSoftmax softmax(scale.log2);
        attend(softmax, mask, own, loaded, first_row + row_of_thread());
        if (store(softmax, queue.current())) {
          columns().for_each_piece([&](int first, int end) {
            repair_stored_rows<C>(call_, queue.current(), index_, first, end, C::keys_per_half);
          });
        }
      } else {
        if (loaded.end > 0) release_queries();
        if (loaded.has(0, rank_)) ring_.skip(C::key_chunks);
        skip_steps(loaded, 0);
        columns().for_each_piece([&](int first, int end) {
          store_rows_without_keys(call_, at, first_row, first, end, rank_ == 0);
        });
      }
    }
  }

 private:
  __device__ __forceinline__ Columns<C> columns() const {
    return {rank_, static_cast<int>(call_.head_dim_v)};
  }

  __device__ __forceinline__ void attend(PairSoftmax& softmax, const typename C::Mask& mask,
                                         const KeyTiles& tiles, const Halves& loaded, int row) {
    const Halves own{tiles.end};
    const int scored = own.of(rank_);  // steps of which this block has scores
    if (scored > 0) {
      multiply_keys(false);
      wgmma_wait<0>();
      ring_.release();
      wgmma_landed(scores_[0]);
      fit(softmax, mask, tiles, row, 0);
      weigh<0, squares>(softmax);
      send(softmax);
    } else if (loaded.has(0, rank_)) {
      ring_.skip(C::key_chunks);
    }
    if (scored <= 1) release_queries();

    int at = 0;
#pragma unroll 1
    for (; at + 1 < scored; ++at) step(softmax, mask, tiles, row, at);
    wgmma_wait<0>();
    if (at > 0) ring_.release();
#pragma unroll 1
    for (; at < own.steps(); ++at) finish(softmax, own, loaded, at);
    skip_steps(loaded, at);
  }

  // Scores of the next step, and the output of this one, which needs both halves. Without a branch
  // around products: ptxas would not let them overlap with anything then.
  __device__ __forceinline__ void step(PairSoftmax& softmax, const typename C::Mask& mask,
                                       const KeyTiles& tiles, int row, int step) {
    multiply_keys(step > 0);
    receive(softmax);
    for_each_chunk<2 * C::value_chunks>([&](auto index) {
      constexpr int chunk = decltype(index)::value, all = 2 * C::value_chunks;
      constexpr int sent_after = C::spread && C::value_chunks > 1 ? C::value_chunks + 1 : all - 1;
      multiply_values<chunk % C::value_chunks>(chunk < C::value_chunks ? weights_ : peer_weights_,
                                               chunk > 0 || step > 0);
      wgmma_wait<1>();
      ring_.release();
      if constexpr (chunk == 0) {
        wgmma_landed(scores_[0]);
        if (step + 2 == Halves{tiles.end}.of(rank_)) release_queries();
      }
      if constexpr (chunk == (C::spread ? 0 : all - 1)) fit(softmax, mask, tiles, row, step + 1);
      // The weights take the registers of those that the chunks before this one read.
      if constexpr (!C::spread && chunk == all - 1) weigh<0, squares>(softmax);
      if constexpr (C::spread && chunk > 0 && chunk <= C::value_chunks) {
        weigh<(chunk - 1) * squares_per_chunk, chunk * squares_per_chunk>(softmax);
      }
      if constexpr (chunk == sent_after) send(softmax);
    });
  }

  // The output of a step before which this block has no more scores to multiply out: the last, of
  // which the second half may not be needed, and then the one before it too in the second block.
  __device__ __forceinline__ void finish(PairSoftmax& softmax, const Halves& own,
                                         const Halves& loaded, int step) {
    if (loaded.has(step + 1, rank_)) ring_.skip(C::key_chunks);
    const bool of_peer = own.has(step, 1 - rank_);
    if (of_peer) {
      receive(softmax);
    } else {
      constexpr float none[2] = {PairSoftmax::kNoShift, PairSoftmax::kNoShift};
      join(softmax, none);
    }
    bool begun = step > 0;
    const auto half = [&](bool needed, int rank, const Weights& weights) {
      if (needed) {
        for_each_chunk<C::value_chunks>([&](auto index) {
          constexpr int chunk = decltype(index)::value;
          multiply_values<chunk>(weights, begun || chunk > 0);
          if constexpr (chunk > 0) {
            wgmma_wait<1>();
            ring_.release();
          }
        });
        wgmma_wait<0>();
        ring_.release();
        begun = true;
      } else if (loaded.has(step, rank)) {
        ring_.skip(C::value_chunks);
      }
    };
    half(own.has(step, rank_), rank_, weights_);
    half(of_peer, 1 - rank_, peer_weights_);
    wgmma_landed(out_);
  }

  // scores = q k^T of this block's half of the next step, of which the last chunk stays under way.
  // A chunk of values may still be when it begins, which is done when it ends.
  __device__ __forceinline__ void multiply_keys(bool values_under_way) {
    for_each_chunk<C::key_chunks>([&](auto index) {
      constexpr int chunk = decltype(index)::value;
      constexpr int all = (C::head_dim + 15) / 16, most = C::groups_per_chunk * 4;
      constexpr int first = chunk * most;  // in steps of 16 columns
      constexpr int end = all - first < most ? all : first + most;
      multiply_key_chunk<Element, first, end, C::query_group_bytes, C::key_group_bytes>(
          scores_[0], memory_.queries(index_), ring_.take());
      wgmma_wait<1>();
      if (chunk > 0 || values_under_way) ring_.release();
    });
  }

  // out += p v of chunk `Chunk` of a half's keys, which stays under way.
  template <int Chunk>
  __device__ __forceinline__ void multiply_values(const Weights& weights, bool accumulate) {
    constexpr int first = Chunk * squares_per_chunk;
    if constexpr (C::columns <= 256) {
      multiply_value_chunk<Element, first, squares_per_chunk, C::value_group_bytes>(
          out_, weights, ring_.take(), accumulate);
    } else {
      multiply_wide_value_chunk<Element, first, squares_per_chunk, C::value_group_bytes>(
          out_, weights, ring_.take(), accumulate);
    }
  }

  __device__ __forceinline__ void fit(PairSoftmax& softmax, const typename C::Mask& mask,
                                      const KeyTiles& tiles, int row, int step) {
    const int half = 2 * step + rank_;
    if (half >= tiles.first_masked) mask.apply(scores_, row, half * C::keys_per_half);
    softmax.fit(scores_);
  }

  template <int First, int End>
  __device__ __forceinline__ void weigh(PairSoftmax& softmax) {
#pragma unroll
    for (int k = First; k < End; ++k) {
      softmax.weigh(scores_, k);
#pragma unroll
      for (int i = 0; i < 8; ++i) compute_here(scores_[0][2 * k + i / 4][i % 4]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& tile = scores_[0][2 * k + i / 2];
        weights_[k][i] = Element::pack(tile[i % 2 * 2], tile[i % 2 * 2 + 1]);
      }
    }
  }

  __device__ __forceinline__ void send(const PairSoftmax& softmax) {
    exchange_.send_weights(weights_, softmax.own_shift(0), softmax.own_shift(1));
  }

  // Takes the other block's weights of this step.
  __device__ __forceinline__ void receive(PairSoftmax& softmax) {
    float shifts[2];
    exchange_.receive_weights(peer_weights_, shifts);
    join(softmax, shifts);
  }

  // Brings both blocks' weights and the output to one shift, once no product into it is under way.
  __device__ __forceinline__ void join(PairSoftmax& softmax, const float (&peer_shifts)[2]) {
    PairSoftmax::Factors factors;
    if (!softmax.join(peer_shifts, factors)) return;
    wgmma_landed(out_);
#pragma unroll
    for (int n = 0; n < C::columns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out_[n][i] *= factors.out[i / 2];
    }
    scale_weights<Element>(weights_, factors.own);
    scale_weights<Element>(peer_weights_, factors.peer);
  }

  // The rest of the ring from the values of `step` on, which only the other warpgroup needs.
  __device__ __forceinline__ void skip_steps(const Halves& loaded, int step) {
#pragma unroll 1
    for (; step < loaded.steps(); ++step) {
      if (loaded.has(step + 1, rank_)) ring_.skip(C::key_chunks);
      ring_.skip((loaded.has(step, 0) + loaded.has(step, 1)) * C::value_chunks);
    }
  }

  __device__ __forceinline__ void release_queries() const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(memory_.queries_free(index_));
  }

  // Whether some of it was not finite, which a hidden value may have caused.
  __device__ __forceinline__ bool store(PairSoftmax& softmax, const RowTile& at) {
    const int first_row = at.first_row + index_ * 64;
    exchange_.finish(softmax);
    void* matrix = matrix_at(call_.out, call_.out_strides, at.batch, at.head_q);
    const int64_t sequence = at.batch * call_.heads_q + at.head_q;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + row_of_thread() + half * 8;
      const auto store_piece = [&](const auto& out, int piece) {
        const int64_t element = row * call_.out_strides[2] + columns().first(piece);
        store_row<Element>(out, half, softmax.normalizer(0, half),
                           static_cast<char*>(matrix) + element * 2,
                           columns().end(piece) - columns().first(piece), row < rows_);
      };
      if constexpr (Columns<C>::pieces == 1) store_piece(out_, 0);
      if constexpr (Columns<C>::pieces == 2) {
        store_piece(Columns<C>::template of<0>(out_), 0);
        store_piece(Columns<C>::template of<1>(out_), 1);
      }
      if (call_.lse != nullptr && rank_ == 0 && threadIdx.x % 4 == 0 && row < rows_) {
        call_.lse[sequence * rows_ + row] = softmax.log_sum(0, half);
      }
    }
    if constexpr (!C::Mask::hides_values) return false;
    return __any_sync(~0u, has_nonfinite(out_, 0) || has_nonfinite(out_, 1));
  }

  const autofa_params& call_;
  const Memory<C> memory_;
  const int index_, rank_, rows_;
  typename C::Ring::Reader ring_;
  typename C::Exchange exchange_;
  uint32_t full_parity_ = 0;
  float scores_[1][C::keys_per_half / 8][4];
  float out_[C::columns / 8][4];
  Weights weights_, peer_weights_;
};

}  // namespace autofa::hopper_cluster_split_d
