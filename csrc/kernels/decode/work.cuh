// Which rows and keys a thread block works on. The query rows that read one key head are packed:
// row r is query r / group of the head's query r % group, so that limits never fall with r.
#pragma once

#include <cstdint>

#include "autofa/abi.h"
#include "autofa/block/mask.cuh"

namespace autofa::decode {

// What the two kernels of a call are given.
struct SplitCall {
  autofa_params call;
  int splits;  // of the keys of a block of rows; 1: results are not partial
};

// Sizes that follow from a call.
struct Packing {
  int group, rows;  // query heads of a key head, and rows of all of them

  __host__ __device__ explicit Packing(const autofa_params& call)
      : group(static_cast<int>(static_cast<unsigned>(call.heads_q) /
                               static_cast<unsigned>(call.heads_kv))),
        rows(group * static_cast<int>(call.seqlen_q)) {}

  __host__ __device__ unsigned row_blocks(int block_m) const {
    return (static_cast<unsigned>(rows) + block_m - 1) / block_m;
  }
};

// Where partial results lie in the workspace: of each key head, split and row an output divided by
// its weights' sum, in f32, and after all of these the natural logs of those sums.
class Partials {
 public:
  __host__ __device__ Partials(const SplitCall& split, int rows)
      : rows_(rows),
        splits_(split.splits),
        head_dim_(static_cast<int>(split.call.head_dim)),
        count_(split.call.batch * split.call.heads_kv * split.splits * rows),
        base_(static_cast<float*>(split.call.workspace)) {}

  __host__ __device__ int64_t bytes() const { return count_ * (head_dim_ + 1) * 4; }

  __device__ __forceinline__ int64_t index(int unit, int split, int row) const {
    return (static_cast<int64_t>(unit) * splits_ + split) * rows_ + row;
  }
  __device__ __forceinline__ float* out(int64_t index) const { return base_ + index * head_dim_; }
  __device__ __forceinline__ float& log_sum(int64_t index) const {
    return base_[count_ * head_dim_ + index];
  }

 private:
  int rows_, splits_, head_dim_;
  int64_t count_;
  float* base_;
};

// A row of the output, and where its log-sum-exp belongs.
struct RowResult {
  char* out;
  float* lse;  // null if it is not wanted

  __device__ __forceinline__ RowResult(const autofa_params& call, int group, int unit, int row) {
    const int heads_kv = static_cast<int>(call.heads_kv);
    const int batch = unit / heads_kv, head = unit % heads_kv * group + row % group;
    const int query = row / group;
    out = static_cast<char*>(call.out) +
          (batch * call.out_strides[0] + head * call.out_strides[1] + query * call.out_strides[2]) *
              2;
    lse = call.lse == nullptr ? nullptr
                              : call.lse + (batch * call.heads_q + head) * call.seqlen_q + query;
  }
};

template <class C>
struct BlockPlace {
  int unit;  // batch and key head
  int split, first_row, batch, head_kv;
  int key_warp, column_warp;
  Packing packing;
  KeyLimit<C::causal> limit;  // of queries
  int first_key, end_key;     // of the split

  __device__ __forceinline__ explicit BlockPlace(const SplitCall& arg)
      : packing(arg.call),
        limit(static_cast<int>(arg.call.seqlen_q), static_cast<int>(arg.call.seqlen_k)) {
    const unsigned row_blocks = packing.row_blocks(C::block_m);
    const unsigned splits = static_cast<unsigned>(arg.splits);
    first_row = static_cast<int>(blockIdx.x % row_blocks) * C::block_m;
    split = static_cast<int>(blockIdx.x / row_blocks % splits);
    unit = static_cast<int>(blockIdx.x / row_blocks / splits);
    batch = unit / static_cast<int>(arg.call.heads_kv);
    head_kv = unit % static_cast<int>(arg.call.heads_kv);
    // As a value that the compiler knows to be the same for the whole warp.
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    key_warp = warp / C::column_warps;
    column_warp = warp % C::column_warps;
    const int64_t seen = limit_of(first_row + C::block_m - 1);
    first_key = static_cast<int>(seen * split / arg.splits);
    end_key = static_cast<int>(seen * (split + 1) / arg.splits);
  }

  // Of the key warp that has the most: none has less than one less.
  __device__ __forceinline__ int most_tiles() const {
    return (end_key - first_key + C::block_n - 1) / C::block_n;
  }

  // The keys that a row sees; rows beyond the last stand for the last.
  __device__ __forceinline__ int limit_of(int row) const {
    if constexpr (C::causal == AUTOFA_CAUSAL_NONE) return limit(0);
    return limit(min(row, packing.rows - 1) / packing.group);
  }

  // The thread's first row.
  __device__ __forceinline__ int row() const {
    return first_row + static_cast<int>(threadIdx.x) % 32 / 4;
  }
  __device__ __forceinline__ int first_column() const { return column_warp * C::columns; }
};

}  // namespace autofa::decode
