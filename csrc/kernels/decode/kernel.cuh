// Attention of few queries (flash-decoding, Dao et al. 2023): it takes as long as reading the keys
// and values. The query heads that share a key head are rows of one tile, so those are read once;
// the keys are split over thread blocks until every SM has work, and of a block's part over its
// warps, each with a ring of buffers of its own. Head dims of which a warp cannot hold the output
// are split over warps too. A second kernel adds partial results up.
#pragma once

#include "autofa/abi.h"
#include "autofa/block/fragments.cuh"
#include "autofa/block/launch.cuh"
#include "autofa/block/softmax.cuh"
#include "combine.cuh"
#include "config.cuh"
#include "launch.cuh"
#include "results.cuh"
#include "ring.cuh"
#include "rows.cuh"
#include "visible.cuh"
#include "work.cuh"

namespace autofa::decode {

template <class C>
__global__ void __launch_bounds__(C::threads, C::blocks_per_sm)
    attend(const __grid_constant__ SplitCall arg) {
  using Element = typename C::Element;
  using Tile = typename C::KvTile;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t memory = shared_address(shared);
  let_next_kernel_start();

  const BlockPlace<C> place(arg);
  const int warp = place.key_warp * C::column_warps + place.column_warp;
  Ring<C> ring(arg, place, memory + warp * C::ring_bytes);
  ring.start();
  // Scores that a mask was added to are scaled already.
  const SoftmaxScale scale =
      C::mask == AUTOFA_MASK_ADDITIVE ? SoftmaxScale() : SoftmaxScale(arg.call.scale);
  const Queries<C> queries(arg, place, scale.negate_queries);
  ScoreSum<C> score_sum(memory + C::warps * C::ring_bytes, place);
  const MaskRows<C> mask(arg, place);
  const int all_see = min(place.limit_of(place.first_row), place.end_key);

  OnlineSoftmax<C::m_tiles> softmax(scale.log2);
  float out[C::m_tiles][C::o_tiles][4] = {};
  const int tiles = ring.count();
  for (int tile = 0; tile < tiles; ++tile) {
    const int first_key = ring.first_key(tile);
    float scores[C::m_tiles][C::n_tiles][4];
    multiply_qk<Element, Tile, AUTOFA_F32>(scores, queries, ring.keys());
    ring.release_keys(tile);
    score_sum.add(scores);
    const uint32_t values = ring.values();
    if constexpr (C::mask != AUTOFA_MASK_NONE) {
      mask.apply(scores, first_key);
      softmax.fit(scores, out);
      isolate_nonfinite<C, Ring<C>>(out, values, [&](int row, int key) {
        return mask.sees(place.row() + row, first_key + key);
      });
    } else if (first_key + C::keys > all_see) {
      const Visible<C> visible(place, first_key);
      visible.hide(scores);
      softmax.fit(scores, out);
      if constexpr (C::causal != AUTOFA_CAUSAL_NONE) {
        isolate_nonfinite<C, Ring<C>>(out, values, [&](int row, int key) {
          return first_key + key < min(place.limit_of(place.row() + row), place.end_key);
        });
      }
    } else {
      softmax.fit(scores, out);
    }
    accumulate_pv<Element, Tile, AUTOFA_F32>(out, scores, values,
                                             [&](int k) { softmax.weigh(scores, k); });
    ring.release_values(tile);
  }
  if (tiles < place.most_tiles()) score_sum.skip();
  store_results(arg, place, softmax, out, memory);
}

template <class Params>
struct Kernel {
  using C = Config<Params>;
  static constexpr int threads = C::threads;
  static constexpr int smem_bytes = C::smem_bytes;

  static int32_t launch(const autofa_params& call, const autofa_executor&, void* stream) {
    if (!serves<C>(call) || rows(call) > INT32_MAX - C::block_m) return AUTOFA_REFUSED;
    if (call.batch * rows(call) == 0) return AUTOFA_OK;
    const Packing packing(call);
    const Room room = launcher().room(call.device_index);
    if (room.error != 0) return room.error;
    const SplitCall arg = split(call, packing, room);
    const int64_t units = call.batch * call.heads_kv;
    const int64_t blocks = units * packing.row_blocks(C::block_m) * arg.splits;
    const int64_t combine_blocks = units * packing.rows * CombineShape::column_blocks(C::head_dim);
    if (std::max(blocks, combine_blocks) > INT32_MAX) return AUTOFA_REFUSED;
    return launcher().run(arg, blocks, combine_blocks, room, stream);
  }

  static int64_t workspace_bytes(const autofa_params& call) {
    if (!serves<C>(call) || rows(call) > INT32_MAX - C::block_m) return 0;
    if (call.batch * rows(call) == 0) return 0;
    const Packing packing(call);
    const Room room = launcher().room(call.device_index);
    if (room.error != 0) return 0;
    const SplitCall arg = split(call, packing, room);
    return arg.splits > 1 ? Partials(arg, packing.rows).bytes() : 0;
  }

 private:
  // Of all heads of a sequence.
  static int64_t rows(const autofa_params& call) { return call.heads_q * call.seqlen_q; }

  static SplitLauncher<C>& launcher() {
    static SplitLauncher<C> only(&attend<C>, &combine<C>);
    return only;
  }

  static SplitCall split(const autofa_params& call, const Packing& packing, const Room& room) {
    const int64_t row_blocks = call.batch * call.heads_kv * packing.row_blocks(C::block_m);
    const int64_t at_once = int64_t{room.processors} * room.blocks_each;
    const int64_t enough =
        int64_t{room.processors} * enough_blocks(room.blocks_each, C::warps * C::ring_bytes);
    return {call, choose_splits(row_blocks, call.seqlen_k, C::block_n, at_once, enough)};
  }
};

}  // namespace autofa::decode
