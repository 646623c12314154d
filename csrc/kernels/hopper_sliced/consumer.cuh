// A consumer: one warpgroup that owns 64 query rows of a tile together with the same warpgroup of
// the cluster's other blocks, with its slice's share of the scores, its keys' weights and its
// columns of the output in registers.
//
// Of 16 keys for each block, the weights are sent a step before its output is multiplied out, and
// the scores two, so that what comes from the others has the products of a step to arrive in. Of 32
// keys the products are long enough to have the scores arrive during the values of the step before,
// and the weights, worked out beside the scores of the next step, during those.
#pragma once

#include "autofa/block/chunk_products.cuh"
#include "autofa/block/fragment_store.cuh"
#include "autofa/block/mapped_call.cuh"
#include "autofa/block/pair_softmax.cuh"
#include "autofa/block/stored_repair.cuh"
#include "autofa/block/warpgroup_rows.cuh"
#include "config.cuh"

namespace autofa::hopper_sliced {

template <class C>
class Consumer {
  using Element = typename C::Element;
  static constexpr int ahead = C::ahead;
  // Whether scores are sent while those of the step before are yet to be weighed.
  static constexpr bool keeps_two = C::early && C::lag > 0;

 public:
  __device__ __forceinline__ Consumer(const MappedCall& mapped, const Memory<C>& memory, int index,
                                      int rank)
      : call_(mapped.call),
        memory_(memory),
        index_(index),
        rank_(rank),
        rows_(static_cast<int>(call_.seqlen_q)),
        ring_(memory.ring()),
        exchange_(memory.exchange(index), memory.exchange_barriers(index), rank) {}

  __device__ __forceinline__ void run() {
    const SoftmaxScale scale(call_.scale);
    typename C::Queue queue(call_, blockIdx.x / C::ranks, gridDim.x / C::ranks);
    RowTile at;
#pragma unroll 1
    while (queue.next(at)) {
      const typename C::Mask mask(call_, at.batch, at.head_q);
      const int first_row = at.first_row + index_ * 64;
      const int loaded = KeyTiles(mask, at.first_row, C::block_m, rows_, C::block_n).end;
      KeyTiles own(mask, first_row, 64, rows_, C::block_n);
      if (first_row >= rows_) own.end = 0;
      if (loaded > 0) {
        mbarrier_wait(memory_.queries_full(index_), full_parity_);
        full_parity_ ^= 1;
        if (scale.negate_queries) {
          negate_elements(memory_.queries(index_), C::query_bytes, 1 + index_);
        }
      }
      if (own.end > 0) {
        PairSoftmax softmax(scale.log2);
        attend(softmax, mask, own, loaded, first_row + row_of_thread());
        if (store(softmax, queue.current(), own.end)) {
          repair_stored_rows<C>(call_, queue.current(), index_, first_column(), end_column(),
                                C::block_n);
        }
      } else {
        if (loaded > 0) release_queries();
        ring_.skip(min(loaded, ahead) * C::key_chunks);
        skip_steps(loaded, 0);
        store_rows_without_keys(call_, at, first_row, first_column(), end_column(), rank_ == 0);
      }
    }
  }

 private:
  __device__ __forceinline__ int first_column() const { return rank_ * C::columns; }
  __device__ __forceinline__ int end_column() const {
    return min(first_column() + C::columns, static_cast<int>(call_.head_dim_v));
  }

  __device__ __forceinline__ void attend(PairSoftmax& softmax, const typename C::Mask& mask,
                                         const KeyTiles& tiles, int loaded, int row) {
    const int first = min(tiles.end, ahead);
#pragma unroll 1
    for (int next = 0; next < first; ++next) {
      multiply_keys(false);
      if (next > 0) weigh(softmax, mask, tiles, row, next - 1);
      wgmma_wait<0>();
      release<C::keys_under_way>();
      wgmma_landed(scores_);
      exchange_.send_scores(next, scores_, own_scores_[0]);
    }
    if (tiles.end <= ahead) release_queries();
    if (tiles.end < ahead) {
      ring_.skip((min(loaded, ahead) - tiles.end) * C::key_chunks);
      weigh(softmax, mask, tiles, row, tiles.end - 1);
    }

    int at = 0;
#pragma unroll 1
    for (; at + ahead < tiles.end; ++at) step(softmax, mask, tiles, row, at);
    wgmma_wait<0>();
    if (at > 0) release<C::values_under_way>();
#pragma unroll 1
    for (; at < tiles.end; ++at) finish(softmax, mask, tiles, loaded, row, at);
    wgmma_landed(out_);
    skip_steps(loaded, at);
  }

  // Scores and weights of later steps, and the output of this one. Without a branch around
  // products: ptxas would not let them overlap with anything then.
  __device__ __forceinline__ void step(PairSoftmax& softmax, const typename C::Mask& mask,
                                       const KeyTiles& tiles, int row, int step) {
    constexpr int keys_under_way = C::lag == 0 ? 1 : C::keys_under_way;
    multiply_keys(step > 0);
    if constexpr (C::lag == 0) {
      weigh(softmax, mask, tiles, row, step);
      wgmma_wait<1>();
      release<C::keys_under_way - 1>();
    }
    receive(softmax, step);
    for_each_chunk<C::value_chunks>([&](auto index) {
      constexpr int chunk = decltype(index)::value;
      multiply_values<chunk>(step > 0);
      wgmma_wait<(chunk < C::values_under_way ? chunk + 1 : C::values_under_way)>();
      if constexpr (chunk == 0) {
        release<keys_under_way>();
        wgmma_landed(scores_);
        if (step + ahead + 1 == tiles.end) release_queries();
      } else if constexpr (chunk >= C::values_under_way) {
        ring_.release();
      }
      if constexpr (C::early && chunk == C::sending_chunk) send_scores(step + ahead);
      if constexpr (C::lag > 0 && chunk == C::value_chunks - 1) {
        weigh(softmax, mask, tiles, row, step + C::lag);
      }
      if constexpr (!C::early && chunk == C::sending_chunk) send_scores(step + ahead);
    });
    if constexpr (keeps_two) {
#pragma unroll
      for (int n = 0; n < 2 * C::own_squares; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) own_scores_[0][n][i] = later_scores_[n][i];
      }
    }
  }

  __device__ __forceinline__ void send_scores(int step) {
    if constexpr (keeps_two) {
      exchange_.send_scores(step, scores_, later_scores_);
    } else {
      exchange_.send_scores(step, scores_, own_scores_[0]);
    }
  }

  // A step after which this tile has no more scores to multiply out.
  __device__ __forceinline__ void finish(PairSoftmax& softmax, const typename C::Mask& mask,
                                         const KeyTiles& tiles, int loaded, int row, int step) {
    if (step + ahead < loaded) ring_.skip(C::key_chunks);
    if constexpr (C::lag == 0) weigh(softmax, mask, tiles, row, step);
    receive(softmax, step);
    for_each_chunk<C::value_chunks>([&](auto index) {
      multiply_values<decltype(index)::value>(step > 0);
      wgmma_wait<0>();
      ring_.release();
    });
    if (C::lag > 0 && step + C::lag < tiles.end) {
      weigh(softmax, mask, tiles, row, step + C::lag);
    }
  }

  // scores = this slice's part of q k^T of a step, of which the last chunks stay under way. Those
  // of values may still be when it begins, and are done when it ends.
  __device__ __forceinline__ void multiply_keys(bool values_under_way) {
    for_each_chunk<C::key_chunks>([&](auto index) {
      constexpr int chunk = decltype(index)::value;
      constexpr int all = C::slice / 16, most = C::groups_per_chunk * 4;
      constexpr int first = chunk * most;  // in steps of 16 columns
      constexpr int end = all - first < most ? all : first + most;
      multiply_key_chunk<Element, first, end, C::query_group_bytes, C::key_group_bytes>(
          scores_, memory_.queries(index_), ring_.take());
      wgmma_wait<(chunk < C::keys_under_way ? chunk + 1 : C::keys_under_way)>();
      if constexpr (chunk == 0) {
        if (values_under_way) release<C::values_under_way>();
      } else if constexpr (chunk >= C::keys_under_way) {
        ring_.release();
      }
    });
  }

  template <int Chunks>
  __device__ __forceinline__ void release() {
#pragma unroll
    for (int i = 0; i < Chunks; ++i) ring_.release();
  }

  // out += p v of some squares of a step's keys, which stays under way.
  template <int Chunk>
  __device__ __forceinline__ void multiply_values(bool accumulate) {
    multiply_value_chunk<Element, Chunk * C::squares_per_chunk, C::squares_per_chunk,
                         C::value_group_bytes, C::square_bytes>(out_, weights_, ring_.take(),
                                                                Chunk > 0 || accumulate);
  }

  // Works out the weights of this block's keys of a step and sends them.
  __device__ __forceinline__ void weigh(PairSoftmax& softmax, const typename C::Mask& mask,
                                        const KeyTiles& tiles, int row, int step) {
    exchange_.add_scores(step, own_scores_[0]);
    if (step >= tiles.first_masked) {
      mask.apply(own_scores_, row, step * C::block_n + rank_ * C::keys);
    }
    softmax.fit(own_scores_);
    uint32_t words[C::own_squares][4];
#pragma unroll
    for (int k = 0; k < C::own_squares; ++k) {
      softmax.weigh(own_scores_, k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& tile = own_scores_[0][2 * k + i / 2];
        words[k][i] = Element::pack(tile[i % 2 * 2], tile[i % 2 * 2 + 1]);
      }
    }
    exchange_.send_weights(step, words, softmax.own_shift(0), softmax.own_shift(1));
    if constexpr (C::lag == 0) {
#pragma unroll
      for (int k = 0; k < C::own_squares; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights_[k][i] = words[k][i];
      }
    } else {
      exchange_.keep_weights(words);
    }
  }

  // Takes the others' weights of this step, and brings all weights and the output to one shift,
  // once no product into it is under way.
  __device__ __forceinline__ void receive(PairSoftmax& softmax, int step) {
    typename C::Exchange::Rows shifts;
    exchange_.receive_weights(step, weights_, shifts);
    float top[2] = {shifts.of[0][0], shifts.of[0][1]};
#pragma unroll
    for (int slot = 1; slot < C::ranks - 1; ++slot) {
      top[0] = fmaxf(top[0], shifts.of[slot][0]);
      top[1] = fmaxf(top[1], shifts.of[slot][1]);
    }
    PairSoftmax::Factors factors;
    if (!softmax.join(top, factors)) return;
    wgmma_landed(out_);
#pragma unroll
    for (int n = 0; n < C::columns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out_[n][i] *= factors.out[i / 2];
    }
#pragma unroll
    for (int k = 0; k < C::own_squares; ++k) scale_square(k, factors.own);
#pragma unroll
    for (int slot = 0; slot < C::ranks - 1; ++slot) {
      const float of_slot[2] = {exp2_fast(shifts.of[slot][0] - softmax.shift(0)),
                                exp2_fast(shifts.of[slot][1] - softmax.shift(1))};
#pragma unroll
      for (int k = 0; k < C::own_squares; ++k) {
        scale_square((slot + 1) * C::own_squares + k, of_slot);
      }
    }
  }

  __device__ __forceinline__ void scale_square(int square, const float (&factors)[2]) {
    uint32_t (&words)[1][4] = reinterpret_cast<uint32_t (&)[1][4]>(weights_[square]);
    scale_weights<Element>(words, factors);
  }

  // The rest of the ring from the values of `step` on, which only the other warpgroup needs.
  __device__ __forceinline__ void skip_steps(int loaded, int step) {
#pragma unroll 1
    for (; step < loaded; ++step) {
      if (step + ahead < loaded) ring_.skip(C::key_chunks);
      ring_.skip(C::value_chunks);
    }
  }

  __device__ __forceinline__ void release_queries() const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(memory_.queries_free(index_));
  }

  // Whether some of it was not finite, which a hidden value may have caused.
  __device__ __forceinline__ bool store(PairSoftmax& softmax, const RowTile& at, int steps) {
    const int first_row = at.first_row + index_ * 64;
    typename C::Exchange::Rows sums;
    const float own[2] = {softmax.finish(0), softmax.finish(1)};
    exchange_.finish(steps, own[0], own[1], sums);
#pragma unroll
    for (int slot = 0; slot < C::ranks - 1; ++slot) {
      softmax.add(0, sums.of[slot][0]);
      softmax.add(1, sums.of[slot][1]);
    }
    void* matrix = matrix_at(call_.out, call_.out_strides, at.batch, at.head_q);
    const int64_t sequence = at.batch * call_.heads_q + at.head_q;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + row_of_thread() + half * 8;
      const int64_t element = row * call_.out_strides[2] + first_column();
      store_row<Element>(out_, half, softmax.normalizer(0, half),
                         static_cast<char*>(matrix) + element * 2, end_column() - first_column(),
                         row < rows_);
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
  float scores_[C::block_n / 8][4];
  float own_scores_[1][2 * C::own_squares][4];
  float later_scores_[2 * C::own_squares][4];  // of the step after, where both are there at once
  float out_[C::columns / 8][4];
  // Of the step's keys, rounded, in squares of 16: this block's first.
  uint32_t weights_[C::squares][4];
};

}  // namespace autofa::hopper_sliced
