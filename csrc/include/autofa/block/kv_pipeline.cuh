// Streams the key and value tiles of one head through shared memory, behind the computation.
//
// One stage: one buffer each. Values load during q k^T, the next keys during softmax and p v; two
// barriers per tile. Two stages: both tiles load a whole tile ahead, into the buffers that the tile
// before left; one barrier per tile, twice the memory.
#pragma once

#include <cstdint>

#include "autofa/arch/cp_async.cuh"
#include "autofa/block/tile.cuh"

namespace autofa {

template <class KTile, class VTile, int Threads, int HeadDim, int Stages>
class KvPipeline {
  static_assert(Stages == 1 || Stages == 2, "single or double buffered");
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

  // Starts the first loads; what the caller started before is waited for together with them.
  __device__ __forceinline__ void start() {
    if (tile_end_ > 0) load_keys(0);
    if (Stages == 2 && tile_end_ > 0) load_values(0);
    cp_async_commit();
  }

  // Waits for what start() started. Other threads' copies need a barrier besides.
  __device__ __forceinline__ void wait_started() const { cp_async_wait<0>(); }

  // The buffer of the tile's keys, loaded. All threads call it once per tile, in order.
  __device__ __forceinline__ uint32_t keys(int tile) {
    cp_async_wait<0>();
    __syncthreads();  // all copies are there, and all threads have done with the tile before
    if (Stages == 1) {
      load_values(tile);
    } else if (tile + 1 < tile_end_) {
      load_keys(tile + 1);
      load_values(tile + 1);
    }
    cp_async_commit();
    return key_buffer(tile);
  }

  // The buffer of the tile's values, loaded. All threads call it after keys(tile) was used up.
  __device__ __forceinline__ uint32_t values(int tile) {
    if (Stages == 1) {
      cp_async_wait<0>();
      __syncthreads();
      if (tile + 1 < tile_end_) load_keys(tile + 1);
      cp_async_commit();
    }
    return value_buffer(tile);
  }

  __device__ __forceinline__ const VLoader& value_loader() const { return v_loader_; }

 private:
  __device__ __forceinline__ uint32_t key_buffer(int tile) const {
    return shared_ + (Stages == 2 ? tile % 2 * KTile::bytes : 0);
  }
  __device__ __forceinline__ uint32_t value_buffer(int tile) const {
    return shared_ + Stages * KTile::bytes + (Stages == 2 ? tile % 2 * VTile::bytes : 0);
  }
  __device__ __forceinline__ void load_keys(int tile) {
    k_loader_.load(key_buffer(tile), tile * KTile::rows, keys_);
  }
  __device__ __forceinline__ void load_values(int tile) {
    v_loader_.load(value_buffer(tile), tile * VTile::rows, keys_);
  }

  KLoader k_loader_;
  VLoader v_loader_;
  uint32_t shared_;
  int keys_, tile_end_;
};

}  // namespace autofa
