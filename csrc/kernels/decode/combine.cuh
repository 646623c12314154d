// The second kernel of a call whose keys were split: adds the partial results of each row up, in
// the order of the keys.
#pragma once

#include <cstdint>

#include "autofa/arch/dependent_launch.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "results.cuh"
#include "work.cuh"

namespace autofa::decode {

// A block has one row and 128 columns, a lane four of them, and a warp every fourth split.
struct CombineShape {
  static constexpr int warps = 4;
  static constexpr int threads = warps * 32;
  static constexpr int columns = 128;
  static constexpr int smem_bytes = warps * (32 * 16 + 4);

  static __host__ __device__ unsigned column_blocks(int head_dim) {
    return (head_dim + columns - 1) / columns;
  }
};

template <class C>
__global__ void __launch_bounds__(CombineShape::threads)
    combine(const __grid_constant__ SplitCall arg) {
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr unsigned column_blocks =
      (C::head_dim + CombineShape::columns - 1) / CombineShape::columns;
  const Packing packing(arg.call);
  const unsigned unit_row = blockIdx.x / column_blocks;
  const int unit = static_cast<int>(unit_row / static_cast<unsigned>(packing.rows));
  const int row = static_cast<int>(unit_row % static_cast<unsigned>(packing.rows));
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int column =
      static_cast<int>(blockIdx.x % column_blocks) * CombineShape::columns + lane * 4;
  const Partials partials(arg, packing.rows);
  wait_for_preceding_kernel();

  float top = -kInfinity;
  for (int split = lane; split < arg.splits; split += 32) {
    top = fmaxf(top, partials.log_sum(partials.index(unit, split, row)));
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));

  float sum[4] = {}, total = 0.0f;
#pragma unroll 4
  for (int split = warp; split < arg.splits; split += CombineShape::warps) {
    const int64_t index = partials.index(unit, split, row);
    const float weight = weight_of(partials.log_sum(index), top);
    total += weight;
    if (column < C::head_dim) {
      const uint4 words = *reinterpret_cast<const uint4*>(partials.out(index) + column);
      sum[0] += weight * __uint_as_float(words.x);
      sum[1] += weight * __uint_as_float(words.y);
      sum[2] += weight * __uint_as_float(words.z);
      sum[3] += weight * __uint_as_float(words.w);
    }
  }

  const uint32_t place = shared_address(shared) + lane * 16;
  const uint32_t totals = shared_address(shared) + CombineShape::warps * 32 * 16;
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(sum[i]);
  store_shared_16(place + warp * 32 * 16, words);
  if (lane == 0) store_shared_4(totals + warp * 4, __float_as_uint(total));
  __syncthreads();
  if (warp != 0) return;
  total = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
#pragma unroll
  for (int w = 0; w < CombineShape::warps; ++w) {
    load_shared_16(words, place + w * 32 * 16);
    total += __uint_as_float(load_shared_4(totals + w * 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += __uint_as_float(words[i]);
  }
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;
  const RowResult result(arg.call, packing.group, unit, row);
  if (column < C::head_dim) {
    *reinterpret_cast<uint64_t*>(result.out + column * 2) =
        C::Element::pack(sum[0] * factor, sum[1] * factor) |
        static_cast<uint64_t>(C::Element::pack(sum[2] * factor, sum[3] * factor)) << 32;
  }
  if (result.lse != nullptr && column == 0) *result.lse = log_sum_of(total, top);
}

}  // namespace autofa::decode
