// Streams the key and value tiles of one head through shared memory, behind the computation.
//
// One stage: one buffer each. Values load during q k^T, the next keys during softmax and p v; two
// barriers per tile. More stages: both load stages - 1 tiles ahead, into the buffers that the tile
// before left; one barrier per tile, and as many times the memory.
#pragma once

#include <cstdint>

#include "autofa/arch/cp_async.cuh"
#include "autofa/block/tile.cuh"

namespace autofa {

template <class KTile, class VTile, int Threads, int HeadDim, int Stages>
class KvPipeline {
  static_assert(Stages >= 1);
  using KLoader = TileLoader<KTile, Threads, HeadDim>;
  using VLoader = TileLoader<VTile, Threads, HeadDim>;

 public:
  static constexpr int bytes = Stages * (KTile::bytes + VTile::bytes);

  // Tiles [0, tile_end) of the matrices `k` and `v` with `keys` rows, through the buffers at
  // `shared`.
  __device__ __forceinline__ KvPipeline(uint32_t shared, const void* k, int64_t k_stride,
                                        const void* v, int64_t v_stride, int keys, int tile_end)
      : k_loader_(k, k_stride),
        v_loader_(v, v_stride),
        shared_(shared),
        keys_(keys),
        tile_end_(tile_end) {}

  // Starts the first loads; what the caller started before is waited for together with the first.
  __device__ __forceinline__ void start() {
    if (Stages == 1) {
      if (tile_end_ > 0) load_keys(0, 0);
      cp_async_commit();
    }
#pragma unroll
    for (int tile = 0; tile < Stages - 1; ++tile) load_tile(tile, tile);
  }

  // Waits for the caller's loads before start(). Those of other threads need a barrier besides.
  __device__ __forceinline__ void wait_started() const { cp_async_wait<ahead>(); }

  // The buffer of the tile's keys, loaded. All threads call it once per tile, in order.
  __device__ __forceinline__ uint32_t keys(int tile) {
    cp_async_wait<ahead>();
    __syncthreads();  // all copies are there, and all threads have done with the tile before
    if (Stages == 1) {
      load_values(tile, 0);
      cp_async_commit();
    } else {
      buffer_ = buffer_ + 1 == Stages ? 0 : buffer_ + 1;
      load_tile(tile + Stages - 1, buffer_ == 0 ? Stages - 1 : buffer_ - 1);
    }
    return key_buffer(buffer_);
  }

  // The buffer of the tile's values, loaded. All threads call it after keys(tile) was used up.
  __device__ __forceinline__ uint32_t values(int tile) {
    if (Stages == 1) {
      cp_async_wait<0>();
      __syncthreads();
      if (tile + 1 < tile_end_) load_keys(tile + 1, 0);
      cp_async_commit();
    }
    return value_buffer(buffer_);
  }

  __device__ __forceinline__ const VLoader& value_loader() const { return v_loader_; }

 private:
  static constexpr int ahead = Stages > 2 ? Stages - 2 : 0;  // tiles that may still be on the way

  __device__ __forceinline__ uint32_t key_buffer(int buffer) const {
    return shared_ + buffer * KTile::bytes;
  }
  __device__ __forceinline__ uint32_t value_buffer(int buffer) const {
    return shared_ + Stages * KTile::bytes + buffer * VTile::bytes;
  }
  __device__ __forceinline__ void load_keys(int tile, int buffer) {
    k_loader_.load(key_buffer(buffer), tile * KTile::rows, keys_);
  }
  __device__ __forceinline__ void load_values(int tile, int buffer) {
    v_loader_.load(value_buffer(buffer), tile * VTile::rows, keys_);
  }
  __device__ __forceinline__ void load_tile(int tile, int buffer) {
    if (tile < tile_end_) {
      load_keys(tile, buffer);
      load_values(tile, buffer);
    }
    cp_async_commit();
  }

  KLoader k_loader_;
  VLoader v_loader_;
  uint32_t shared_;
  int keys_, tile_end_;
  int buffer_ = Stages == 1 ? 0 : Stages - 1;  // of the tile at hand
};

}  // namespace autofa
