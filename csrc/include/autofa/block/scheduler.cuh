// Which query rows a thread block works on, and which key tiles those rows need.
#pragma once

#include <cstdint>
#include <type_traits>

#include "autofa/abi.h"
#include "autofa/block/mask.cuh"

namespace autofa {

// Blocks of one head follow each other, so that its keys and values stay in L2, and the last rows
// come first: under a causal mask they have the most work, and the grid ends on the short ones.
// All in one grid dimension, since batch * heads may exceed the 65535 of the others.
struct BlockWork {
  int batch, head_q, head_kv, first_row;

  __device__ __forceinline__ BlockWork(const autofa_params& call, int block_m) {
    const unsigned heads = static_cast<unsigned>(call.heads_q);
    const unsigned row_blocks = (static_cast<unsigned>(call.seqlen_q) + block_m - 1) / block_m;
    const unsigned sequence = blockIdx.x / row_blocks;
    const unsigned group = heads / static_cast<unsigned>(call.heads_kv);
    first_row = static_cast<int>(row_blocks - 1 - blockIdx.x % row_blocks) * block_m;
    batch = static_cast<int>(sequence / heads);
    head_q = static_cast<int>(sequence % heads);
    head_kv = static_cast<int>(static_cast<unsigned>(head_q) / group);
  }

  // Thread blocks of a call.
  static int64_t count(const autofa_params& call, int block_m) {
    return (call.seqlen_q + block_m - 1) / block_m * call.heads_q * call.batch;
  }
};

// The key tiles [0, end) that rows [first_row, first_row + block_m) need, and the first that hides
// a key from one of them.
struct KeyTiles {
  int end, first_masked;

  template <class Mask>
  __device__ __forceinline__ KeyTiles(const Mask& mask, int first_row, int block_m, int rows,
                                      int block_n)
      : end((mask(min(first_row + block_m, rows) - 1) + block_n - 1) / block_n),
        first_masked(Mask::on_every_tile ? 0 : mask(first_row) / block_n) {}
};

// Start of one (batch, head) matrix of 16-bit elements.
template <class Pointer>
__device__ __forceinline__ Pointer* matrix_at(Pointer* tensor, const int64_t (&strides)[3],
                                              int batch, int head) {
  using Bytes = std::conditional_t<std::is_const_v<Pointer>, const char, char>;
  return static_cast<Bytes*>(tensor) + (batch * strides[0] + head * strides[1]) * 2;
}

}  // namespace autofa
