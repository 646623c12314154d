// A warp's rows on one tile of its keys: queries in registers, and scores that column warps add up.
#pragma once

#include <cstdint>

#include "autofa/arch/shared_memory.cuh"
#include "autofa/arch/warpgroup.cuh"
#include "autofa/block/softmax.cuh"
#include "work.cuh"

namespace autofa::decode {

// The warp's columns of all rows, as A fragments, straight from global memory: they are read once.
template <class C>
class Queries {
 public:
  __device__ __forceinline__ Queries(const SplitCall& arg, const BlockPlace<C>& place,
                                     bool negate) {
    const autofa_params& call = arg.call;
    const uint32_t sign = negate ? 0x80008000u : 0u;
    const int column = place.first_column() + static_cast<int>(threadIdx.x) % 4 * 2;
    for_each_row<C::m_tiles>([&](int m, int half) {
      const int row = place.row() + m * 16 + half * 8;
      const int head = place.head_kv * place.packing.group + row % place.packing.group;
      const char* source = static_cast<const char*>(call.q) +
                           (place.batch * call.q_strides[0] + head * call.q_strides[1] +
                            row / place.packing.group * call.q_strides[2] + column) *
                               2;
#pragma unroll
      for (int k = 0; k < C::squares; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int step = k * 16 + i * 8;
          const bool there =
              row < place.packing.rows && (C::whole_columns || column + step < C::head_dim);
          held_[k][m][2 * i + half] =
              there ? *reinterpret_cast<const uint32_t*>(source + step * 2) ^ sign : 0u;
        }
      }
    });
  }

  __device__ __forceinline__ void read(uint32_t (&a)[C::m_tiles][4], int k) const {
#pragma unroll
    for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[m][i] = held_[k][m][i];
    }
  }

 private:
  uint32_t held_[C::squares][C::m_tiles][4];
};

// Adds up what the column warps of a key warp found, each of its columns: all get the same sums. A
// tile's partial scores stay where they are until the barrier of the next one.
template <class C>
class ScoreSum {
 public:
  __device__ __forceinline__ ScoreSum(uint32_t shared, const BlockPlace<C>& place)
      : key_warp_(place.key_warp),
        column_warp_(place.column_warp),
        place_(shared + place.key_warp * C::column_warps * C::score_bytes +
               static_cast<int>(threadIdx.x) % 32 * 16) {}

  __device__ __forceinline__ void add(float (&scores)[C::m_tiles][C::n_tiles][4]) {
    if constexpr (C::column_warps > 1) {
      each(scores, [&](float (&sums)[4], int offset) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(sums[i]);
        store_shared_16(place_ + column_warp_ * C::score_bytes + offset, words);
      });
      wait();
      each(scores, [&](float (&sums)[4], int offset) {
#pragma unroll
        for (int warp = 0; warp < C::column_warps; ++warp) {
          uint32_t words[4];
          load_shared_16(words, place_ + warp * C::score_bytes + offset);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums[i] = warp == 0 ? __uint_as_float(words[i]) : sums[i] + __uint_as_float(words[i]);
          }
        }
      });
      constexpr int buffer_bytes = C::warps * C::score_bytes;
      place_ = odd_ ? place_ - buffer_bytes : place_ + buffer_bytes;
      odd_ = !odd_;
    }
  }

  // For a tile that other key warps have and this one has not. Without it results are the same, but
  // racecheck is not: see store_results.
  __device__ __forceinline__ void skip() const {
    if constexpr (C::column_warps > 1 && C::key_warps > 1) wait();
  }

 private:
  __device__ __forceinline__ void wait() const {
    named_barrier_sync(1 + key_warp_, C::column_warps * 32);
  }

  template <class Function>
  static __device__ __forceinline__ void each(float (&scores)[C::m_tiles][C::n_tiles][4],
                                              Function f) {
#pragma unroll
    for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::n_tiles; ++n) {
        f(scores[m][n], (m * C::n_tiles + n) * C::fragment_bytes);
      }
    }
  }

  int key_warp_, column_warp_;
  uint32_t place_;
  bool odd_ = false;
};

}  // namespace autofa::decode
