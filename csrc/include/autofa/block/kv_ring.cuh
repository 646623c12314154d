// Streams key and value tiles of one head through one ring of equal buffers: K0 V0 K1 V1 ...
//
// With more stages than one, each is loaded stages - 1 pieces ahead, so that two stages load values
// during q k^T and the next keys during p v. One stage loads, waits, and is multiplied: half the
// memory of two, and it is other blocks on the SM that hide the time. What KvPipeline offers, and
// to be called like it.
#pragma once

#include <cstdint>

#include "autofa/arch/cp_async.cuh"
#include "autofa/block/tile.cuh"

namespace autofa {

template <class KvTile, int Threads, int HeadDim, int Stages>
class KvRing {
  using Loader = TileLoader<KvTile, Threads, HeadDim>;
  static constexpr int ahead = Stages - 1;  // pieces: keys of tile t are 2t, values 2t + 1

 public:
  static constexpr int bytes = Stages * KvTile::bytes;

  __device__ __forceinline__ KvRing(uint32_t shared, const void* k, int64_t k_stride, const void* v,
                                    int64_t v_stride, int keys, int tile_end)
      : k_loader_(k, k_stride),
        v_loader_(v, v_stride),
        shared_(shared),
        keys_(keys),
        tile_end_(tile_end) {}

  __device__ __forceinline__ void start() {
    if (ahead == 0) cp_async_commit();  // what the caller has started
#pragma unroll
    for (int piece = 0; piece < ahead; ++piece) load(piece % 2, piece / 2, piece);
  }

  __device__ __forceinline__ void wait_started() const { cp_async_wait<pending>(); }

  // The buffer of the tile's keys, loaded. All threads call it once per tile, in order.
  __device__ __forceinline__ uint32_t keys(int tile) { return next(ahead % 2, tile + ahead / 2); }

  // The buffer of the tile's values, loaded. All threads call it after keys(tile) was used up.
  __device__ __forceinline__ uint32_t values(int tile) {
    return next((ahead + 1) % 2, tile + (ahead + 1) / 2);
  }

  __device__ __forceinline__ const Loader& value_loader() const { return v_loader_; }

  // Until all threads have done with the buffers.
  __device__ __forceinline__ void drain() const {
    cp_async_wait<0>();
    __syncthreads();
  }

 private:
  static constexpr int pending = ahead > 1 ? ahead - 1 : 0;  // pieces that may be on their way

  // The next buffer; meanwhile the piece that is `ahead` of it is loaded.
  __device__ __forceinline__ uint32_t next(bool values, int tile) {
    if (Stages > 1) cp_async_wait<pending>();
    __syncthreads();  // all copies are there, and all threads have done with the piece before
    const int free = slot_;
    slot_ = slot_ + 1 == Stages ? 0 : slot_ + 1;
    load(values, tile, Stages > 1 ? free : 0);
    if (Stages == 1) {
      cp_async_wait<0>();
      __syncthreads();
    }
    return shared_ + slot_ * KvTile::bytes;
  }

  __device__ __forceinline__ void load(bool values, int tile, int slot) {
    if (tile < tile_end_) {
      (values ? v_loader_ : k_loader_)
          .load(shared_ + slot * KvTile::bytes, tile * KvTile::rows, keys_);
    }
    cp_async_commit();
  }

  Loader k_loader_, v_loader_;
  uint32_t shared_;
  int keys_, tile_end_;
  int slot_ = ahead;  // of the piece at hand
};

}  // namespace autofa
