// Streams a warp's own keys and values, a slice of the head dim each, through its part of shared
// memory. No other warp reads them, so no barrier of the block stands between a copy and its use,
// and a buffer is filled again as soon as it was read: all of them are on the way at any time.
#pragma once

#include <cstdint>

#include "autofa/arch/cp_async.cuh"
#include "work.cuh"

namespace autofa::decode {

template <class C>
class Ring {
  using Tile = typename C::KvTile;
  static constexpr int row_chunks = Tile::cols / 8;
  static constexpr int passes = Tile::rows * row_chunks / 32;
  // Whether a lane's chunks lie in one column.
  static constexpr bool straight = 32 % row_chunks == 0;

 public:
  __device__ __forceinline__ Ring(const SplitCall& arg, const BlockPlace<C>& place, uint32_t shared)
      : first_key_(place.first_key + place.key_warp * C::keys),
        end_key_(place.end_key),
        columns_left_(C::head_dim - place.first_column()),
        shared_(shared),
        k_(arg.call.k, arg.call.k_strides, place, first_key_),
        v_(arg.call.v, arg.call.v_strides, place, first_key_) {}

  // How many tiles the warp has.
  __device__ __forceinline__ int count() const {
    const int left = end_key_ - first_key_;
    return left <= 0 ? 0 : (left + C::block_n - 1) / C::block_n;
  }
  __device__ __forceinline__ int first_key(int tile) const {
    return first_key_ + tile * C::block_n;
  }

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int tile = 0; tile < C::stages; ++tile) {
      load(k_, tile, 2 * tile);
      load(v_, tile, 2 * tile + 1);
    }
  }

  // The tile's keys, for which it waits. After their last use: release_keys.
  __device__ __forceinline__ uint32_t keys() const {
    wait();
    return buffer(2 * stage_);
  }
  __device__ __forceinline__ void release_keys(int tile) {
    __syncwarp();
    load(k_, tile + C::stages, 2 * stage_);
  }
  // Likewise the values. Then the next tile's turn comes.
  __device__ __forceinline__ uint32_t values() const {
    wait();
    return buffer(2 * stage_ + 1);
  }
  __device__ __forceinline__ void release_values(int tile) {
    __syncwarp();
    load(v_, tile + C::stages, 2 * stage_ + 1);
    stage_ = stage_ + 1 == C::stages ? 0 : stage_ + 1;
  }

  // Calls f(address) for each 16-byte chunk that this lane copies into the tile at `target`.
  template <class Function>
  static __device__ __forceinline__ void for_each_chunk(uint32_t target, Function f) {
#pragma unroll 1
    for (int id = static_cast<int>(threadIdx.x) % 32; id < passes * 32; id += 32) {
      f(target + Tile::offset(id / row_chunks, id % row_chunks));
    }
  }

 private:
  struct Matrix {
    const char* row;  // of the warp's first key, in the warp's first column
    int64_t row_bytes;

    __device__ __forceinline__ Matrix(const void* tensor, const int64_t (&strides)[3],
                                      const BlockPlace<C>& place, int first_key)
        : row_bytes(strides[2] * 2) {
      row = static_cast<const char*>(tensor) +
            (place.batch * strides[0] + place.head_kv * strides[1] + place.first_column()) * 2 +
            first_key * row_bytes;
    }
  };

  __device__ __forceinline__ uint32_t buffer(int number) const {
    return shared_ + number * Tile::bytes;
  }

  // What was started first is there: 2 * stages are on the way, this one and those after it.
  __device__ __forceinline__ void wait() const {
    cp_async_wait<2 * C::stages - 1>();
    __syncwarp();
  }

  __device__ __forceinline__ void load(const Matrix& matrix, int tile, int number) const {
    const int64_t first = static_cast<int64_t>(tile) * C::block_n;
    const int left = end_key_ - first_key_ - static_cast<int>(first);
    const char* source = matrix.row + first * matrix.row_bytes;
    if (left >= Tile::rows) {
      copy<false>(buffer(number), source, matrix.row_bytes, left);
    } else if (left > 0) {
      copy<true>(buffer(number), source, matrix.row_bytes, left);
    }
    cp_async_commit();
  }

  // Rows from `rows` on and columns beyond the head dim become zeros, and nothing of them is read.
  template <bool Ragged>
  __device__ __forceinline__ void copy(uint32_t target, const char* source, int64_t row_bytes,
                                       int rows) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (straight) {
      constexpr int rows_per_pass = 32 / row_chunks;
      const int row = lane / row_chunks, chunk = lane % row_chunks;
      source += row * row_bytes + chunk * 16;
      target += Tile::offset(row, chunk);
      const bool there = C::whole_columns || chunk * 8 < columns_left_;
#pragma unroll
      for (int pass = 0; pass < passes; ++pass) {
        cp_async_16(target + Tile::offset(pass * rows_per_pass, 0), source,
                    there && (!Ragged || pass * rows_per_pass + row < rows));
        source += rows_per_pass * row_bytes;
      }
    } else {
      // Steps from chunk to chunk. Places that are the same for every tile would be kept in
      // registers, of which there are too few; of a value that the compiler does not know they
      // are not.
      int unknown_lane = lane;
      asm volatile("" : "+r"(unknown_lane));
      int row = unknown_lane / row_chunks, chunk = unknown_lane % row_chunks;
      constexpr int rows_per_pass = 32 / row_chunks, chunks_per_pass = 32 % row_chunks;
      source += row * row_bytes + chunk * 16;
#pragma unroll
      for (int pass = 0; pass < passes; ++pass) {
        cp_async_16(target + Tile::offset(row, chunk), source,
                    (C::whole_columns || chunk * 8 < columns_left_) && (!Ragged || row < rows));
        row += rows_per_pass;
        chunk += chunks_per_pass;
        source += rows_per_pass * row_bytes + chunks_per_pass * 16;
        if (chunk >= row_chunks) {
          ++row;
          chunk -= row_chunks;
          source += row_bytes - row_chunks * 16;
        }
      }
    }
  }

  int first_key_, end_key_, columns_left_;
  uint32_t shared_;
  Matrix k_, v_;
  int stage_ = 0;
};

}  // namespace autofa::decode
