// The tiles of query rows that a persistent thread block works on, one after the other.
#pragma once

#include <cstdint>

#include "autofa/abi.h"

namespace autofa {

struct RowTile {
  int batch, head_q, head_kv, first_row;
};

// All tiles of `Heads` heads come before those of the next `Heads`, so that the keys and values in
// use fit the L2; among them the last rows come first, since under a causal mask they have the most
// work. Blocks take the tiles in turn, every other time in reverse: whoever got the longest of one
// round gets the shortest of the next.
template <int Rows, int Heads>
class TileQueue {
 public:
  // Of taker `place` of `places`: of a thread block, or of a cluster of them.
  __device__ __forceinline__ explicit TileQueue(const autofa_params& call,
                                                unsigned place = blockIdx.x,
                                                unsigned places = gridDim.x)
      : call_(call), place_(place), places_(places) {}

  static int64_t count(const autofa_params& call) {
    return (call.seqlen_q + Rows - 1) / Rows * call.heads_q * call.batch;
  }

  // The taker's next tile; false after its last.
  __device__ __forceinline__ bool next(RowTile& tile) {
    const unsigned place = round_ % 2 ? places_ - 1 - place_ : place_;
    ++round_;
    return seek((round_ - 1) * places_ + place, tile);
  }

  // The tile that comes at `index` of all; false if there are not so many.
  __device__ __forceinline__ bool seek(unsigned index, RowTile& tile) {
    index_ = index;
    if (index_ >= opaque(call_.batch) * opaque(call_.heads_q) * row_tiles()) return false;
    tile = current();
    return true;
  }

  __device__ __forceinline__ unsigned index() const { return index_; }

  // The tile that next() gave, worked out anew: where it was needed long ago, registers that keep
  // it cost more.
  __device__ __forceinline__ RowTile current() const {
    const unsigned heads = opaque(call_.heads_q), row_tiles = this->row_tiles();
    const unsigned sequences = opaque(call_.batch) * heads;
    const unsigned first = index_ / (Heads * row_tiles) * Heads;  // sequence of the group
    const unsigned wide = sequences - first < Heads ? sequences - first : Heads;
    const unsigned within = index_ - first * row_tiles;
    const unsigned sequence = first + within % wide;
    const unsigned head = sequence % heads;
    return {static_cast<int>(sequence / heads), static_cast<int>(head),
            static_cast<int>(head / (heads / opaque(call_.heads_kv))),
            static_cast<int>(row_tiles - 1 - within / wide) * Rows};
  }

 private:
  // Unknown to the compiler, which else keeps the reciprocals of what it divides by over all tiles.
  static __device__ __forceinline__ unsigned opaque(int64_t value) {
    unsigned word = static_cast<unsigned>(value);
    asm volatile("" : "+r"(word));
    return word;
  }

  __device__ __forceinline__ unsigned row_tiles() const {
    return (opaque(call_.seqlen_q) + Rows - 1) / Rows;
  }

  const autofa_params& call_;
  const unsigned place_, places_;
  unsigned round_ = 0, index_ = 0;
};

}  // namespace autofa
