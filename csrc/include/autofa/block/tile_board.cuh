// Where a thread block's producer says which tile of query rows comes next, and its consumers read
// it: two places in turn, so that the producer begins the next tile while this one is worked on.
#pragma once

#include <cstdint>

#include "autofa/arch/mbarrier.cuh"
#include "autofa/arch/shared_memory.cuh"

namespace autofa {

struct TileBoard {
  static constexpr uint32_t none = ~0u;  // after the last tile
  static constexpr int places = 2;
  static constexpr int bytes = places * 3 * kMbarrierBytes;

  uint32_t base;  // in shared memory

  __device__ __forceinline__ uint32_t posted(int place) const {
    return base + place * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t taken(int place) const { return posted(places + place); }
  __device__ __forceinline__ uint32_t tile(int place) const { return posted(2 * places + place); }

  // By one thread, before its mbarrier_init_fence().
  __device__ __forceinline__ void init(int reading_warps) const {
    for (int place = 0; place < places; ++place) {
      mbarrier_init(posted(place), 1);
      mbarrier_init(taken(place), reading_warps);
    }
  }
};

// One thread writes, all threads of the reading warps read.
class TileBoardTurn {
 public:
  __device__ __forceinline__ explicit TileBoardTurn(const TileBoard& board) : board_(board) {}

  __device__ __forceinline__ void post(uint32_t tile) {
    mbarrier_wait(board_.taken(place_), parity_ ^ 1);
    store_shared_4(board_.tile(place_), tile);
    mbarrier_arrive(board_.posted(place_));
    advance();
  }

  __device__ __forceinline__ uint32_t read() {
    mbarrier_wait(board_.posted(place_), parity_);
    const uint32_t tile = __shfl_sync(~0u, load_shared_4(board_.tile(place_)), 0);
    if (threadIdx.x % 32 == 0) mbarrier_arrive(board_.taken(place_));
    advance();
    return tile;
  }

 private:
  __device__ __forceinline__ void advance() {
    place_ ^= 1;
    if (place_ == 0) parity_ ^= 1;
  }

  const TileBoard board_;
  int place_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace autofa
