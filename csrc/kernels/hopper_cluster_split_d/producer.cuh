// The producer: one thread that has TMA bring in the queries, and the keys and values in the order
// in which the consumers of its block use them.
#pragma once

#include "autofa/arch/tma.cuh"
#include "autofa/block/scheduler.cuh"
#include "config.cuh"

namespace autofa::hopper_cluster_split_d {

template <class C>
class Producer {
 public:
  __device__ __forceinline__ Producer(const MappedCall& mapped, const Memory<C>& memory, int rank)
      : mapped_(mapped), memory_(memory), rank_(rank), ring_(memory.ring()) {}

  __device__ __forceinline__ void run() {
    const autofa_params& call = mapped_.call;
    typename C::Queue queue(call, blockIdx.x / kRanks, gridDim.x / kRanks);
#pragma unroll 1
    while (queue.next(at_)) {
      const typename C::Mask mask(call, at_.batch, at_.head_q);
      const KeyTiles tiles(mask, at_.first_row, C::block_m, static_cast<int>(call.seqlen_q),
                           C::keys_per_half);
      const Halves halves{tiles.end};
      if (halves.end == 0) continue;
      load_queries();
      if (halves.has(0, rank_)) load_keys(0);
#pragma unroll 1
      for (int step = 0; step < halves.steps(); ++step) {
        if (halves.has(step + 1, rank_)) load_keys(step + 1);
        if (halves.has(step, rank_)) load_values(2 * step + rank_);
        if (halves.has(step, 1 - rank_)) load_values(2 * step + 1 - rank_);
      }
    }
  }

 private:
  __device__ __forceinline__ void load_queries() {
#pragma unroll 1
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const uint32_t full = memory_.queries_full(consumer);
      mbarrier_wait(memory_.queries_free(consumer), free_parity_ ^ 1);
      mbarrier_arrive_expect(full, C::query_bytes);
      load_groups<C::key_groups, C::query_box_groups, C::query_group_bytes>(
          memory_.queries(consumer), mapped_.q, full, 0, at_.first_row + consumer * 64, at_.head_q,
          at_.batch);
    }
    free_parity_ ^= 1;
  }

  // Of this block's half of a step.
  __device__ __forceinline__ void load_keys(int step) {
    const int key = (2 * step + rank_) * C::keys_per_half;
    constexpr int whole = C::key_groups / C::groups_per_chunk;
    constexpr int rest = C::key_groups % C::groups_per_chunk;
#pragma unroll 1
    for (int chunk = 0; chunk < whole; ++chunk) {
      load_key_chunk<C::groups_per_chunk>(chunk * C::groups_per_chunk * 64, key);
    }
    if constexpr (rest > 0) load_key_chunk<rest>(whole * C::groups_per_chunk * 64, key);
  }

  template <int Groups>
  __device__ __forceinline__ void load_key_chunk(int first_column, int key) {
    ring_.write(Groups * C::key_group_bytes, [&](uint32_t target, uint32_t full) {
      load_groups<Groups, C::key_box_groups, C::key_group_bytes>(
          target, mapped_.k, full, first_column, key, at_.head_kv, at_.batch);
    });
  }

  // This block's columns of the values of a half.
  __device__ __forceinline__ void load_values(int half) {
    const Columns<C> columns{rank_, static_cast<int>(mapped_.call.head_dim_v)};
#pragma unroll 1
    for (int chunk = 0; chunk < C::value_chunks; ++chunk) {
      const int first_key = half * C::keys_per_half + chunk * C::keys_per_chunk;
      ring_.write(C::value_groups * C::value_group_bytes, [&](uint32_t target, uint32_t full) {
        const auto load = [&](auto groups) {
          load_groups<C::value_groups, decltype(groups)::value, C::value_group_bytes>(
              target, mapped_.v, full, columns.first(0), first_key, at_.head_kv, at_.batch);
        };
        if constexpr (Columns<C>::share_a_group) {
#pragma unroll 1
          for (int group = 0; group < C::value_groups; ++group) {
            // Of the second block the last is the first of its columns.
            const int back = group / (C::value_groups - 1) * rank_ * C::columns;
            tma_load(target + group * C::value_group_bytes, mapped_.v, full,
                     columns.first(0) + group * 64 - back, first_key, at_.head_kv, at_.batch);
          }
        } else if (C::value_box_groups > 0 && mapped_.call.head_dim_v % 64 == 0) {
          load(Constant<C::value_box_groups>());
        } else {
          load(Constant<0>());
        }
      });
    }
  }

  const MappedCall& mapped_;
  const Memory<C> memory_;
  const int rank_;
  typename C::Ring::Writer ring_;
  RowTile at_;
  uint32_t free_parity_ = 0;
};

}  // namespace autofa::hopper_cluster_split_d
