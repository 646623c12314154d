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
#include "autofa/block/tile_board.cuh"
#include "autofa/block/tile_queue.cuh"

namespace autofa::hopper_split_q {

template <class Params>
struct Config {
  static constexpr int dtype = Params::dtype;
  static constexpr int causal = Params::causal;
  static constexpr int mask = Params::mask;
  static constexpr int head_dim = Params::head_dim;
  static constexpr int block_m = Params::block_m;
  static constexpr int block_n = Params::block_n;
  static constexpr int columns_v = Params::columns_v;  // the value head dim, filled up
  static constexpr int chunks = Params::chunks;        // of a tile of keys, and of one of values
  static constexpr int weight_sets = Params::weight_sets;
  static constexpr bool turns = Params::turns;  // warpgroups issue their products in turn

  static constexpr int consumers = block_m / 64;                 // warpgroups of 64 rows
  static constexpr bool counted = causal != AUTOFA_CAUSAL_NONE;  // tiles, as they are taken
  static constexpr int threads = kWarpgroupThreads * (consumers + 1);
  // The SM's 64 Ki registers, as setmaxnreg shares them out. With 24 the producer of causal tiles
  // spills 48 bytes, once a tile; with 40, which leaves 232, consumers spill in their loop.
  static constexpr int consumer_registers = consumers == 3 ? 160 : 240;
  static constexpr int producer_registers = consumers == 2 ? 24 : 32;

  static_assert(consumers == 1 ||
                    registers_suffice(consumers, consumer_registers, producer_registers),
                "no more registers than the launch has");
  static_assert(!turns || consumers > 1, "turns are taken among several");
  static_assert(mask == AUTOFA_MASK_NONE, "explicit masks are for other families");
  static_assert(block_m % 64 == 0 && consumers >= 1 && consumers <= 3, "rows of warpgroups");
  static_assert(head_dim % 8 == 0 && head_dim <= 256, "one wgmma has at most 256 columns");
  static_assert(columns_v % 32 == 0 && columns_v <= 256, "lanes store one tile in four");
  static_assert(block_n % (16 * chunks) == 0, "p v consumes 16 keys at a time");
  static_assert(weight_sets == 1 || weight_sets == 2, "this tile's weights, and the next one's");

  // Groups of 64 columns, as TMA writes and wgmma reads them.
  static constexpr int key_groups = (head_dim + 63) / 64;
  static constexpr int value_groups = (columns_v + 63) / 64;
  static constexpr int groups_per_chunk = (key_groups + chunks - 1) / chunks;
  static_assert((chunks - 1) * groups_per_chunk < key_groups, "no chunk of keys is empty");
  static constexpr int keys_per_chunk = block_n / chunks;  // of a chunk of values
  static constexpr int key_box = block_n;                  // keys that one copy brings

  static constexpr int query_group_bytes = 64 * kSwizzledRowBytes;
  static constexpr int key_group_bytes = block_n * kSwizzledRowBytes;
  static constexpr int value_group_bytes = keys_per_chunk * kSwizzledRowBytes;
  static constexpr int query_bytes = key_groups * query_group_bytes;  // of one warpgroup
  static constexpr int stage_bytes =
      std::max(groups_per_chunk * key_group_bytes, value_groups* value_group_bytes);

  using Element = typename ElementOf<dtype>::type;
  using Mask = KeyMask<causal, mask>;
  using Ring = ChunkRing<Params::stages, stage_bytes>;
  using Queue = TileQueue<block_m, Params::heads>;
  static constexpr int smem_bytes = consumers * (query_bytes + 2 * kMbarrierBytes) + Ring::bytes +
                                    Ring::barrier_bytes + TileBoard::bytes;
};

// What lies where in shared memory.
template <class C>
struct Memory {
  uint32_t base;

  __device__ __forceinline__ uint32_t queries(int consumer) const {
    return base + consumer * C::query_bytes;
  }
  __device__ __forceinline__ typename C::Ring ring() const {
    const uint32_t chunks = queries(C::consumers);
    return {chunks, chunks + C::Ring::bytes};
  }
  // Full and free: of a warpgroup's queries.
  __device__ __forceinline__ uint32_t queries_full(int consumer) const {
    return ring().barriers + C::Ring::barrier_bytes + consumer * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t queries_free(int consumer) const {
    return queries_full(C::consumers + consumer);
  }

  __device__ __forceinline__ TileBoard board() const { return {queries_full(2 * C::consumers)}; }

  // By one thread.
  __device__ __forceinline__ void init_barriers() const {
    ring().init(4 * C::consumers);
    board().init(4 * C::consumers);
    for (int consumer = 0; consumer < C::consumers; ++consumer) {
      mbarrier_init(queries_full(consumer), 1);
      mbarrier_init(queries_free(consumer), 4);
    }
    mbarrier_init_fence();
  }
};

}  // namespace autofa::hopper_split_q
