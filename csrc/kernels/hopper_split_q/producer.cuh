// The producer: one thread that takes tiles of query rows and has TMA bring in their queries, and
// the keys and values in the order in which the consumers use them.
#pragma once

#include "autofa/arch/tma.cuh"
#include "autofa/block/scheduler.cuh"
#include "config.cuh"

namespace autofa::hopper_split_q {

template <class C>
class Producer {
 public:
  __device__ __forceinline__ Producer(const MappedCall& mapped, const Memory<C>& memory)
      : mapped_(mapped), memory_(memory), ring_(memory.ring()) {}

  __device__ __forceinline__ void run() {
    const autofa_params& call = mapped_.call;
    const int rows = static_cast<int>(call.seqlen_q);
    // Under a causal mask tiles differ in length: whoever is done takes the next of all, from a
    // counter in the workspace, if there is one.
    auto* const counter = static_cast<unsigned*>(C::counted ? call.workspace : nullptr);
    typename C::Queue queue(call);
    TileBoardTurn board(memory_.board());
    bool more = queue.next(at_);
#pragma unroll 1
    while (more) {
      board.post(queue.index());
      const typename C::Mask mask(call, at_.batch, at_.head_q);
      const KeyTiles tiles(mask, at_.first_row, C::block_m, rows, C::block_n);
      unsigned next = 0;
      if (tiles.end > 0) load_queries();
      if (tiles.end > 0) load_keys(0);
#pragma unroll 1
      for (int tile = 0; tile < tiles.end; ++tile) {
        if (tile + 1 < tiles.end) {
          load_keys(tile + 1);
        } else if (counter != nullptr) {
          next = gridDim.x + atomicAdd(counter, 1u);
        }
        load_values(tile);
      }
      if (counter == nullptr) {
        more = queue.next(at_);
      } else {
        if (tiles.end == 0) next = gridDim.x + atomicAdd(counter, 1u);
        more = queue.seek(next, at_);
      }
    }
    board.post(TileBoard::none);
  }

 private:
  __device__ __forceinline__ void load_queries() {
#pragma unroll 1
    for (int consumer = 0; consumer < C::consumers; ++consumer) {
      const uint32_t full = memory_.queries_full(consumer);
      mbarrier_wait(memory_.queries_free(consumer), free_parity_ ^ 1);
      mbarrier_arrive_expect(full, C::query_bytes);
#pragma unroll 1
      for (int group = 0; group < C::key_groups; ++group) {
        tma_load(memory_.queries(consumer) + group * C::query_group_bytes, mapped_.q, full,
                 group * 64, at_.first_row + consumer * 64, at_.head_q, at_.batch);
      }
    }
    free_parity_ ^= 1;
  }

  __device__ __forceinline__ void load_keys(int tile) {
#pragma unroll 1
    for (int first = 0; first < C::key_groups; first += C::groups_per_chunk) {
      const int groups = min(C::groups_per_chunk, C::key_groups - first);
      ring_.write(groups * C::key_group_bytes, [&](uint32_t target, uint32_t full) {
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
          tma_load(target + group * C::key_group_bytes, mapped_.k, full, (first + group) * 64,
                   tile * C::block_n, at_.head_kv, at_.batch);
        }
      });
    }
  }

  __device__ __forceinline__ void load_values(int tile) {
#pragma unroll 1
    for (int chunk = 0; chunk < C::chunks; ++chunk) {
      const int first_key = tile * C::block_n + chunk * C::keys_per_chunk;
      ring_.write(C::value_groups * C::value_group_bytes, [&](uint32_t target, uint32_t full) {
#pragma unroll 1
        for (int group = 0; group < C::value_groups; ++group) {
          tma_load(target + group * C::value_group_bytes, mapped_.v, full, group * 64, first_key,
                   at_.head_kv, at_.batch);
        }
      });
    }
  }

  const MappedCall& mapped_;
  const Memory<C> memory_;
  typename C::Ring::Writer ring_;
  RowTile at_;
  uint32_t free_parity_ = 0;
};

}  // namespace autofa::hopper_split_q
