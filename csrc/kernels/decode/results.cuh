// After the last key of a split: what the key warps found becomes one result, which is the output
// or a partial one. Everything is added up in a fixed order.
#pragma once

#include <cstdint>

#include "autofa/arch/element.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/block/softmax.cuh"
#include "work.cuh"

namespace autofa::decode {

// What a part of a row's keys weighs beside parts of which `top` is the largest log-sum.
__device__ __forceinline__ float weight_of(float log_sum, float top) {
  constexpr float kLog2e = 1.4426950408889634f;
  return log_sum == -kInfinity ? 0.0f : exp2_fast((log_sum - top) * kLog2e);
}

// The log-sum of a row of which the parts' weights sum up to `total`.
__device__ __forceinline__ float log_sum_of(float total, float top) {
  return total == 0.0f ? -kInfinity : top + log2f(total) * 0.6931471805599453f;
}

// Writes a warp's tiles of 16x8 elements, as accumulators hold them, each as soon as it is there.
template <class C>
class ResultWriter {
 public:
  __device__ __forceinline__ ResultWriter(const SplitCall& arg, const BlockPlace<C>& place)
      : partial_(arg.splits > 1), column_(place.first_column()) {
    const Partials partials(arg, place.packing.rows);
    for_each_row<C::m_tiles>([&](int m, int half) {
      const int row = place.row() + m * 16 + half * 8;
      there_[m][half] = row < place.packing.rows;
      if (!there_[m][half]) return;
      const int column = column_ + static_cast<int>(threadIdx.x) % 4 * 2;
      if (partial_) {
        const int64_t index = partials.index(place.unit, place.split, row);
        out_[m][half] = reinterpret_cast<char*>(partials.out(index) + column);
        log_sum_[m][half] = &partials.log_sum(index);
      } else {
        const RowResult result(arg.call, place.packing.group, place.unit, row);
        out_[m][half] = result.out + column * 2;
        log_sum_[m][half] = result.lse;
      }
    });
  }

  // Columns `n` * 8 on of the warp's.
  __device__ __forceinline__ void put(int m, int n, const float (&values)[4]) const {
    if (!C::whole_columns && column_ + n * 8 >= C::head_dim) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!there_[m][half]) continue;
      const float low = values[2 * half], high = values[2 * half + 1];
      if (partial_) {
        *reinterpret_cast<uint64_t*>(out_[m][half] + n * 32) =
            __float_as_uint(low) | static_cast<uint64_t>(__float_as_uint(high)) << 32;
      } else {
        *reinterpret_cast<uint32_t*>(out_[m][half] + n * 16) = C::Element::pack(low, high);
      }
    }
  }

  __device__ __forceinline__ void put_log_sum(int m, int half, float log_sum) const {
    if (threadIdx.x % 4 != 0 || column_ != 0 || !there_[m][half]) return;
    if (log_sum_[m][half] != nullptr) *log_sum_[m][half] = log_sum;
  }

 private:
  bool partial_;
  int column_;
  bool there_[C::m_tiles][2];
  char* out_[C::m_tiles][2];
  float* log_sum_[C::m_tiles][2];
};

// Divides the output by the weights' sums, and writes it. With several key warps all threads call
// it together, and have no more use for shared memory.
//
// All have waited at as many barriers before it. Where warps of a block had waited at different
// numbers of named barriers, racecheck lost count of __syncthreads and reported hazards across it,
// on an H200. With equal numbers it reports none, and does so if the first one here is removed.
template <class C>
__device__ __forceinline__ void store_results(const SplitCall& arg, const BlockPlace<C>& place,
                                              OnlineSoftmax<C::m_tiles>& softmax,
                                              const float (&out)[C::m_tiles][C::o_tiles][4],
                                              uint32_t shared) {
  softmax.finish();
  float divided[C::m_tiles][2], log_sum[C::m_tiles][2];
  for_each_row<C::m_tiles>([&](int m, int half) {
    divided[m][half] = softmax.normalizer(m, half);
    log_sum[m][half] = softmax.sum(m, half) == 0.0f ? -kInfinity : softmax.log_sum(m, half);
  });
  const auto own_value = [&](int m, int n, int i) { return out[m][n][i] * divided[m][i / 2]; };
  if constexpr (C::key_warps == 1) {
    const ResultWriter<C> writer(arg, place);
#pragma unroll
    for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::o_tiles; ++n) {
        const float values[4] = {own_value(m, n, 0), own_value(m, n, 1), own_value(m, n, 2),
                                 own_value(m, n, 3)};
        writer.put(m, n, values);
      }
    }
    for_each_row<C::m_tiles>(
        [&](int m, int half) { writer.put_log_sum(m, half, log_sum[m][half]); });
    return;
  }

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto fragment = [&](int key_warp, int m, int n) {
    const int index =
        ((key_warp * C::column_warps + place.column_warp) * C::m_tiles + m) * C::o_tiles + n;
    return shared + index * C::fragment_bytes + lane * 16;
  };
  const uint32_t sums = shared + C::warps * C::m_tiles * C::o_tiles * C::fragment_bytes;
  const auto sum_of = [&](int key_warp, int m, int half) {
    return sums + (key_warp * C::block_m + m * 16 + half * 8 + lane / 4) * 4;
  };

  __syncthreads();  // every warp has done with its keys and values
#pragma unroll
  for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::o_tiles; ++n) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(own_value(m, n, i));
      store_shared_16(fragment(place.key_warp, m, n), words);
    }
  }
  if (place.column_warp == 0 && lane % 4 == 0) {
    for_each_row<C::m_tiles>([&](int m, int half) {
      store_shared_4(sum_of(place.key_warp, m, half), __float_as_uint(log_sum[m][half]));
    });
  }
  __syncthreads();

  const ResultWriter<C> writer(arg, place);
  float share[C::m_tiles][2][C::key_warps];
  for_each_row<C::m_tiles>([&](int m, int half) {
    float top = -kInfinity, total = 0.0f;
#pragma unroll
    for (int k = 0; k < C::key_warps; ++k) {
      share[m][half][k] = __uint_as_float(load_shared_4(sum_of(k, m, half)));
      top = fmaxf(top, share[m][half][k]);
    }
#pragma unroll
    for (int k = 0; k < C::key_warps; ++k) {
      share[m][half][k] = weight_of(share[m][half][k], top);
      total += share[m][half][k];
    }
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
    for (int k = 0; k < C::key_warps; ++k) share[m][half][k] *= factor;
    if (place.key_warp == 0) writer.put_log_sum(m, half, log_sum_of(total, top));
  });
#pragma unroll
  for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll 2
    for (int n = place.key_warp; n < C::o_tiles; n += C::key_warps) {
      float values[4] = {};
#pragma unroll
      for (int k = 0; k < C::key_warps; ++k) {
        uint32_t words[4];
        load_shared_16(words, fragment(k, m, n));
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] += __uint_as_float(words[i]) * share[m][i / 2][k];
      }
      writer.put(m, n, values);
    }
  }
}

}  // namespace autofa::decode
