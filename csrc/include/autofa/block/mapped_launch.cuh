// Host side of a persistent kernel that reads by TMA: which calls it serves, and the maps of their
// tensors.
#pragma once

#include <cstdint>

#include "autofa/abi.h"
#include "autofa/block/launch.cuh"
#include "autofa/block/mapped_call.cuh"
#include "autofa/block/persistent_launch.cuh"
#include "autofa/block/tensor_map.cuh"

namespace autofa {

// Each group of 64 columns by itself.
struct GroupBoxes {
  static constexpr int query_box_groups = 0, key_box_groups = 0, value_box_groups = 0;
};

// Queries come in boxes of 64 rows, keys and values in boxes of C::key_box and C::keys_per_chunk;
// `Boxes` says of how many groups of columns.
template <class C, class Boxes = GroupBoxes>
struct MappedLaunch {
  static constexpr int threads = C::threads;
  static constexpr int smem_bytes = C::smem_bytes;

  static int64_t workspace_bytes(const autofa_params&) { return 0; }

 protected:
  static bool serves(const autofa_params& call) {
    constexpr int64_t most = INT32_MAX - 2 * (C::block_m + C::block_n);
    return call.dtype == C::dtype && call.causal == C::causal && call.mask == C::mask &&
           call.head_dim == C::head_dim && call.head_dim_v % 8 == 0 && call.head_dim_v > 0 &&
           call.head_dim_v <= C::columns_v && call.seqlen_q <= most && call.seqlen_k <= most &&
           C::Queue::count(call) <= most &&
           rows_aligned(call.q, call.q_strides, call.batch, call.heads_q, call.seqlen_q) &&
           rows_aligned(call.k, call.k_strides, call.batch, call.heads_kv, call.seqlen_k) &&
           rows_aligned(call.v, call.v_strides, call.batch, call.heads_kv, call.seqlen_k) &&
           rows_aligned(call.out, call.out_strides, call.batch, call.heads_q, call.seqlen_q);
  }

  static bool make_maps(MappedCall& mapped) {
    const autofa_params& call = mapped.call;
    const TensorRows q = {call.q,       call.q_strides, call.batch,
                          call.heads_q, call.seqlen_q,  call.head_dim};
    if (!make_tensor_map(mapped.q, C::dtype, q, 64, Boxes::query_box_groups)) return false;
    if (call.seqlen_k == 0) return true;  // nothing will be loaded
    const TensorRows k = {call.k,        call.k_strides, call.batch,
                          call.heads_kv, call.seqlen_k,  call.head_dim};
    const TensorRows v = {call.v,        call.v_strides, call.batch,
                          call.heads_kv, call.seqlen_k,  call.head_dim_v};
    const int value_groups = call.head_dim_v % 64 == 0 ? Boxes::value_box_groups : 0;
    return make_tensor_map(mapped.k, C::dtype, k, C::key_box, Boxes::key_box_groups) &&
           make_tensor_map(mapped.v, C::dtype, v, C::keys_per_chunk, value_groups);
  }

  static int32_t launch_tiles(PersistentLauncher<MappedCall>& launcher, const autofa_params& call,
                              void* stream) {
    if (!serves(call)) return AUTOFA_REFUSED;
    const int64_t tiles = C::Queue::count(call);
    if (tiles == 0) return AUTOFA_OK;
    MappedCall mapped = {};
    mapped.call = call;
    if (!make_maps(mapped)) return AUTOFA_REFUSED;
    return launcher.run(mapped, call.device_index, tiles, threads, smem_bytes, stream);
  }
};

}  // namespace autofa
