// Pieces of matrices on their way through shared memory: slices of the head dim, chunks of the
// keys.
#pragma once

#include <cstdint>

#include "autofa/arch/cp_async.cuh"

namespace autofa {

// A ring of equal slots that the pieces of a stream pass through in turn, each loaded Stages - 1
// pieces ahead. `Stream` has `pieces`, how many a key tile has, and load(slot, tile, piece), which
// starts the copies of one, if there is such a tile.
template <class Stream, int Stages, int SlotBytes>
class SlotRing {
 public:
  static constexpr int bytes = Stages * SlotBytes;

  __device__ __forceinline__ SlotRing(uint32_t shared, const Stream& stream)
      : stream_(stream), shared_(shared) {
#pragma unroll
    for (int piece = 0; piece < Stages - 1; ++piece) fetch(0, piece);
  }

  // The slot of a piece, loaded. All threads call it together for each in turn, and have then done
  // with the piece before.
  __device__ __forceinline__ uint32_t next(int tile, int piece) {
    if constexpr (Stages > 1) cp_async_wait<Stages - 2>();
    __syncthreads();
    fetch(tile, piece + Stages - 1);
    if constexpr (Stages == 1) {
      cp_async_wait<0>();
      __syncthreads();
    }
    const uint32_t slot = shared_ + read_ * SlotBytes;
    read_ = read_ + 1 == Stages ? 0 : read_ + 1;
    return slot;
  }

  __device__ __forceinline__ const Stream& stream() const { return stream_; }

 private:
  // `piece` counts from the tile's first and may lie in a later tile.
  __device__ __forceinline__ void fetch(int tile, int piece) {
    stream_.load(shared_ + write_ * SlotBytes, tile + piece / Stream::pieces,
                 piece % Stream::pieces);
    cp_async_commit();
    write_ = write_ + 1 == Stages ? 0 : write_ + 1;
  }

  Stream stream_;
  uint32_t shared_;
  int read_ = 0, write_ = 0;
};

}  // namespace autofa
