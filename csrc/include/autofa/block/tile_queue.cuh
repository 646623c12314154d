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
      : place_(place),
        places_(places),
        heads_(static_cast<unsigned>(call.heads_q)),
        group_(heads_ / static_cast<unsigned>(call.heads_kv)),
        sequences_(static_cast<unsigned>(call.batch) * heads_),
        row_tiles_((static_cast<unsigned>(call.seqlen_q) + Rows - 1) / Rows) {}

  static int64_t count(const autofa_params& call) {
    return (call.seqlen_q + Rows - 1) / Rows * call.heads_q * call.batch;
  }

  // The taker's next tile; false after its last.
  __device__ __forceinline__ bool next(RowTile& tile) {
    const unsigned place = round_ % 2 ? places_ - 1 - place_ : place_;
    const unsigned index = round_ * places_ + place;
    if (index >= sequences_ * row_tiles_) return false;
    ++round_;
    const unsigned first = index / (Heads * row_tiles_) * Heads;  // sequence of the group
    const unsigned wide = sequences_ - first < Heads ? sequences_ - first : Heads;
    const unsigned within = index - first * row_tiles_;
    const unsigned sequence = first + within % wide;
    tile.first_row = static_cast<int>(row_tiles_ - 1 - within / wide) * Rows;
    tile.batch = static_cast<int>(sequence / heads_);
    tile.head_q = static_cast<int>(sequence % heads_);
    tile.head_kv = static_cast<int>(sequence % heads_ / group_);
    return true;
  }

 private:
  unsigned place_, places_, heads_, group_, sequences_, row_tiles_;
  unsigned round_ = 0;
};

}  // namespace autofa
