// The compile-time shape of one variant, and what it must satisfy.
#pragma once

#include <algorithm>

#include "autofa/abi.h"
#include "autofa/arch/element.cuh"
#include "autofa/arch/matrix_descriptor.cuh"
#include "autofa/arch/mbarrier.cuh"
#include "autofa/arch/warpgroup.cuh"
#include "autofa/block/chunk_ring.cuh"
#include "autofa/block/mask.cuh"
#include "autofa/block/register_shares.cuh"
#include "autofa/block/slice_exchange.cuh"
#include "autofa/block/tile_queue.cuh"

namespace autofa::hopper_sliced {

constexpr int kConsumers = 2;  // warpgroups of a block, of 64 rows each

template <class Params>
struct Config {
  static constexpr int dtype = Params::dtype;
  static constexpr int causal = Params::causal;
  static constexpr int mask = Params::mask;
  static constexpr int head_dim = Params::head_dim;
  static constexpr int block_m = Params::block_m;
  static constexpr int block_n = Params::block_n;
  static constexpr int columns_v = Params::columns_v;  // the value head dim, filled up
  static constexpr int groups_per_chunk = Params::key_groups;
  static constexpr bool early = Params::early;  // send scores as soon as they are there

  static constexpr bool wide = block_n == 96;
  static constexpr int keys = wide ? 32 : 16;   // of a step, that a block weighs
  static constexpr int ranks = block_n / keys;  // thread blocks of a cluster
  static constexpr int lag = wide ? 0 : 1;      // steps between weights and their use
  static constexpr int ahead = lag + 1;         // and between scores and theirs
  // Whether a step's keys come from those of the block itself on, as its values do: the scores that
  // it keeps then are always the same registers. Costs as many copies as there are blocks.
  static constexpr bool own_first = wide;
  static constexpr int key_box = own_first ? keys : block_n;  // keys that one copy brings
  static constexpr int keys_per_chunk = keys;                 // and values

  // Of weights, 16 keys each.
  static constexpr int squares = block_n / 16, own_squares = keys / 16;
  static constexpr int squares_per_chunk = wide || ranks % 2 == 0 ? 2 : ranks;

  static constexpr int threads = kWarpgroupThreads * (kConsumers + 1);

  static_assert(mask == AUTOFA_MASK_NONE, "explicit masks are for other families");
  static_assert(block_m == 64 * kConsumers && block_n % keys == 0 && ranks > 2 && ranks <= 4,
                "the scheme");
  static_assert(head_dim % 8 == 0 && head_dim <= 256 * ranks, "what the registers hold");
  static_assert(columns_v % (32 * ranks) == 0 && columns_v <= 256 * ranks,
                "one wgmma has at most 256 columns");

  // Of one block: of queries and keys, in steps of 16, and of the output.
  static constexpr int slice = (head_dim + 16 * ranks - 1) / (16 * ranks) * 16;
  static constexpr int columns = columns_v / ranks;
  static constexpr int consumer_registers = 240, producer_registers = 24;
  static_assert(registers_suffice(kConsumers, consumer_registers, producer_registers),
                "no more registers than the launch has");

  // Groups of 64 columns, as TMA writes and wgmma reads them.
  static constexpr int key_groups = (slice + 63) / 64;
  static constexpr int value_groups = (columns + 63) / 64;
  static constexpr int key_chunks = (key_groups + groups_per_chunk - 1) / groups_per_chunk;
  static constexpr int value_chunks = squares / squares_per_chunk;
  // Left under way once all of their kind are issued. Without a lag the weights come and go beside
  // the keys, which must last for that.
  static constexpr int keys_under_way = lag == 0 ? key_chunks : 1;
  static constexpr int values_under_way = value_chunks > 2 ? 2 : 1;
  // The chunk of values beside which scores are sent.
  static constexpr int sending_chunk = (early ? values_under_way : value_chunks) - 1;
  static_assert(Params::stages > keys_under_way && Params::stages > values_under_way,
                "a chunk is free only once it is no longer under way");

  static constexpr int query_group_bytes = 64 * kSwizzledRowBytes;
  static constexpr int key_group_bytes = block_n * kSwizzledRowBytes;
  static constexpr int value_group_bytes = keys * kSwizzledRowBytes;
  static constexpr int part_bytes = value_groups * value_group_bytes;       // of one block's keys
  static constexpr int square_bytes = wide ? kK16BytesAcross : part_bytes;  // to the next
  static constexpr int parts_per_chunk = squares_per_chunk / own_squares;
  static constexpr int query_bytes = key_groups * query_group_bytes;  // of one warpgroup
  static constexpr int stage_bytes =
      std::max(groups_per_chunk * key_group_bytes, parts_per_chunk* part_bytes);

  // Groups that one copy brings, where no group and no chunk is filled up; 0: each by itself.
  static constexpr bool whole = head_dim % (64 * ranks) == 0;
  static constexpr int query_box_groups = whole ? key_groups : 0;
  static constexpr int key_box_groups =
      whole && !own_first && key_groups % groups_per_chunk == 0 ? groups_per_chunk : 0;
  static constexpr int value_box_groups = columns % 64 == 0 ? value_groups : 0;

  using Element = typename ElementOf<dtype>::type;
  using Mask = KeyMask<causal, mask>;
  using Ring = ChunkRing<Params::stages, stage_bytes>;
  using Queue = TileQueue<block_m, Params::heads>;
  using Exchange = SliceExchange<ranks, own_squares, lag, own_first>;
  static constexpr int smem_bytes =
      kConsumers * (query_bytes + Exchange::bytes + Exchange::barrier_bytes) + Ring::bytes +
      Ring::barrier_bytes + 2 * kConsumers * kMbarrierBytes;
};

// What lies where in shared memory.
template <class C>
struct Memory {
  uint32_t base;

  __device__ __forceinline__ uint32_t queries(int consumer) const {
    return base + consumer * C::query_bytes;
  }
  __device__ __forceinline__ typename C::Ring ring() const {
    const uint32_t chunks = queries(kConsumers);
    return {chunks, exchange(kConsumers)};
  }
  __device__ __forceinline__ uint32_t exchange(int consumer) const {
    return queries(kConsumers) + C::Ring::bytes + consumer * C::Exchange::bytes;
  }
  __device__ __forceinline__ uint32_t exchange_barriers(int consumer) const {
    return exchange(kConsumers) + C::Ring::barrier_bytes + consumer * C::Exchange::barrier_bytes;
  }
  // Full and free: of a warpgroup's queries.
  __device__ __forceinline__ uint32_t queries_full(int consumer) const {
    return exchange_barriers(kConsumers) + consumer * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t queries_free(int consumer) const {
    return queries_full(kConsumers + consumer);
  }

  // By one thread.
  __device__ __forceinline__ void init_barriers() const {
    ring().init(4 * kConsumers);
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      mbarrier_init(queries_full(consumer), 1);
      mbarrier_init(queries_free(consumer), 4);
      C::Exchange::init(exchange_barriers(consumer));
    }
    mbarrier_init_fence();
  }
};

}  // namespace autofa::hopper_sliced
