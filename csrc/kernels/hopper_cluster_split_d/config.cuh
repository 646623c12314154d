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
#include "autofa/block/pair_exchange.cuh"
#include "autofa/block/register_shares.cuh"
#include "autofa/block/tile_queue.cuh"

namespace autofa::hopper_cluster_split_d {

constexpr int kRanks = 2;      // thread blocks of a cluster
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
  static constexpr int keys_per_chunk = Params::value_keys;
  static constexpr int keys_per_half = block_n / kRanks;  // each block has the scores of one half
  static constexpr int key_box = keys_per_half;           // keys that one copy brings
  static constexpr bool spread = Params::spread;

  static constexpr int threads = kWarpgroupThreads * (kConsumers + 1);

  static_assert(mask == AUTOFA_MASK_NONE, "explicit masks are for other families");
  static_assert(block_m == 64 * kConsumers && block_n % (16 * kRanks) == 0, "the scheme");
  static_assert(head_dim % 8 == 0 && head_dim <= 640, "a ring fits beside the queries");
  static_assert(columns_v % 64 == 0 && columns_v <= 640, "the output stays in registers");
  static_assert(keys_per_half % keys_per_chunk == 0 && keys_per_chunk % 16 == 0, "whole products");

  static constexpr int columns = columns_v / kRanks;  // of the output, in one block
  // The SM's 64 Ki registers, as setmaxnreg shares them out. The producer spills a few of its own
  // with the fewer.
  static constexpr int consumer_registers = columns > 192 ? 240 : 232;
  static constexpr int producer_registers = columns > 192 ? 24 : 40;
  static_assert(registers_suffice(kConsumers, consumer_registers, producer_registers),
                "no more registers than the launch has");

  // Groups of 64 columns, as TMA writes and wgmma reads them.
  static constexpr int key_groups = (head_dim + 63) / 64;
  static constexpr int value_groups = (columns + 63) / 64;
  static constexpr int key_chunks = (key_groups + groups_per_chunk - 1) / groups_per_chunk;
  static constexpr int value_chunks = keys_per_half / keys_per_chunk;  // of one half's keys

  static constexpr int query_group_bytes = 64 * kSwizzledRowBytes;
  static constexpr int key_group_bytes = keys_per_half * kSwizzledRowBytes;
  static constexpr int value_group_bytes = keys_per_chunk * kSwizzledRowBytes;
  static constexpr int query_bytes = key_groups * query_group_bytes;  // of one warpgroup
  static constexpr int stage_bytes =
      std::max(groups_per_chunk * key_group_bytes, value_groups* value_group_bytes);

  // Groups that one copy brings, where no group and no chunk is filled up; 0: each by itself.
  static constexpr int query_box_groups = head_dim % 64 == 0 ? key_groups : 0;
  static constexpr int key_box_groups =
      head_dim % (64 * groups_per_chunk) == 0 ? groups_per_chunk : 0;
  static constexpr int value_box_groups = columns % 64 == 0 ? value_groups : 0;

  using Element = typename ElementOf<dtype>::type;
  using Mask = KeyMask<causal, mask>;
  using Ring = ChunkRing<Params::stages, stage_bytes>;
  using Exchange = PairExchange<keys_per_half / 16>;
  using Queue = TileQueue<block_m, Params::heads>;
  static constexpr int smem_bytes =
      kConsumers * (query_bytes + Exchange::bytes + Exchange::barrier_bytes) + Ring::bytes +
      Ring::barrier_bytes + 2 * kConsumers * kMbarrierBytes;
};

// A block's columns of the output, in one piece or in two: 256, as many as a warp can store or
// repair of a row, and the rest. Where the rest is half a group, it is so of the group between the
// blocks, of which both take a half: so all other groups begin with a line of memory.
template <class C>
struct Columns {
  static constexpr int most = 256;
  static constexpr int pieces = (C::columns + most - 1) / most;
  static constexpr bool share_a_group = pieces > 1 && C::columns % 64 != 0;
  static_assert(pieces <= 2 && (!share_a_group || C::columns == most + 32));

  int rank, head_dim_v;

  __device__ __forceinline__ int first(int piece) const {
    if (!share_a_group) return rank * C::columns + piece * most;
    return piece == 0 ? rank * (C::columns + 32) : most + rank * 32;
  }
  // As far as the value head dim has them.
  __device__ __forceinline__ int end(int piece) const {
    return min(first(piece) + (piece + 1 < pieces ? most : C::columns - piece * most), head_dim_v);
  }

  // One of the two pieces of the sums.
  template <int Piece>
  static __device__ __forceinline__ auto& of(float (&out)[C::columns / 8][4]) {
    constexpr int blocks = Piece == 0 ? most / 8 : (C::columns - most) / 8;
    return reinterpret_cast<float (&)[blocks][4]>(out[Piece * most / 8]);
  }

  // Calls f(first, end) for each piece.
  template <class Function>
  __device__ __forceinline__ void for_each_piece(Function f) const {
#pragma unroll 1
    for (int piece = 0; piece < pieces; ++piece) f(first(piece), end(piece));
  }
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

// How many of the half steps some rows need: the others lie beyond the last key or the diagonal. A
// step has two of them, and block `rank` of the cluster the scores of one.
struct Halves {
  int end;

  __device__ __forceinline__ int steps() const { return (end + 1) / 2; }
  __device__ __forceinline__ int of(int rank) const { return (end + 1 - rank) / 2; }
  __device__ __forceinline__ bool has(int step, int rank) const { return 2 * step + rank < end; }
};

}  // namespace autofa::hopper_cluster_split_d
