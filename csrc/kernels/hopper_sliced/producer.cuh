// The producer: one thread that has TMA bring in this block's slices of queries, keys and values,
// in the order in which the consumers use them.
#pragma once

#include "autofa/arch/tma.cuh"
#include "autofa/block/mapped_call.cuh"
#include "autofa/block/scheduler.cuh"
#include "config.cuh"

namespace autofa::hopper_sliced {

template <class C>
class Producer {
 public:
  __device__ __forceinline__ Producer(const MappedCall& mapped, const Memory<C>& memory, int rank)
      : mapped_(mapped), memory_(memory), rank_(rank), ring_(memory.ring()) {}

  __device__ __forceinline__ void run() {
    const autofa_params& call = mapped_.call;
    typename C::Queue queue(call, blockIdx.x / C::ranks, gridDim.x / C::ranks);
#pragma unroll 1
    while (queue.next(at_)) {
      const typename C::Mask mask(call, at_.batch, at_.head_q);
      const KeyTiles tiles(mask, at_.first_row, C::block_m, static_cast<int>(call.seqlen_q),
                           C::block_n);
      if (tiles.end == 0) continue;
      load_queries();
#pragma unroll 1
      for (int step = -C::ahead; step < tiles.end; ++step) {
        if (step + C::ahead < tiles.end) load_keys(step + C::ahead);
        if (step >= 0) load_values(step);
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
          memory_.queries(consumer), mapped_.q, full, rank_ * C::slice,
          at_.first_row + consumer * 64, at_.head_q, at_.batch);
    }
    free_parity_ ^= 1;
  }

  __device__ __forceinline__ void load_keys(int step) {
    constexpr int whole = C::key_groups / C::groups_per_chunk;
    constexpr int rest = C::key_groups % C::groups_per_chunk;
#pragma unroll 1
    for (int chunk = 0; chunk < whole; ++chunk) {
      load_key_chunk<C::groups_per_chunk>(chunk * C::groups_per_chunk * 64, step);
    }
    if constexpr (rest > 0) load_key_chunk<rest>(whole * C::groups_per_chunk * 64, step);
  }

  template <int Groups>
  __device__ __forceinline__ void load_key_chunk(int column, int step) {
    ring_.write(Groups * C::key_group_bytes, [&](uint32_t target, uint32_t full) {
#pragma unroll 1
      for (int first = 0; first < C::block_n; first += C::key_box) {
        const int own = C::own_first ? rank_ * C::keys : 0;
        load_groups<Groups, C::key_box_groups, C::key_group_bytes>(
            target + first * kSwizzledRowBytes, mapped_.k, full, rank_ * C::slice + column,
            step * C::block_n + (own + first) % C::block_n, at_.head_kv, at_.batch);
      }
    });
  }

  // From the keys whose weights this block works out on: the consumers have those first.
  __device__ __forceinline__ void load_values(int step) {
#pragma unroll 1
    for (int first = 0; first < C::ranks; first += C::parts_per_chunk) {
      ring_.write(C::parts_per_chunk * C::part_bytes, [&](uint32_t target, uint32_t full) {
#pragma unroll 1
        for (int part = 0; part < C::parts_per_chunk; ++part, target += C::part_bytes) {
          const int key = step * C::block_n + (rank_ + first + part) % C::ranks * C::keys;
          const auto load = [&](auto groups) {
            load_groups<C::value_groups, decltype(groups)::value, C::value_group_bytes>(
                target, mapped_.v, full, rank_ * C::columns, key, at_.head_kv, at_.batch);
          };
          if (C::value_box_groups > 0 && mapped_.call.head_dim_v % 64 == 0) {
            load(Constant<C::value_box_groups>());
          } else {
            load(Constant<0>());
          }
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

}  // namespace autofa::hopper_sliced
