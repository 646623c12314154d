// The product of weights and values where a block has more columns of the output than one wgmma.
#pragma once

#include <cstdint>

#include "autofa/arch/matrix_descriptor.cuh"
#include "autofa/arch/wgmma.cuh"

namespace autofa {

// out (+)= p v as multiply_value_chunk() has it, in two ranges of columns, of which the second
// begins with a group of 64. Both keep a wgmma busy for longer than it takes to read the weights.
template <class Element, int First, int Count, int GroupBytes, int Blocks, int Squares>
__device__ __forceinline__ void multiply_wide_value_chunk(float (&out)[Blocks][4],
                                                          const uint32_t (&weights)[Squares][4],
                                                          uint32_t values, bool accumulate) {
  constexpr int groups = Blocks / 2 / 8, blocks = groups * 8;  // of the first range
  static_assert(groups > 0 && Blocks - blocks <= 32, "one wgmma has at most 256 columns");
  auto& first = reinterpret_cast<float (&)[blocks][4]>(out[0]);
  auto& second = reinterpret_cast<float (&)[Blocks - blocks][4]>(out[blocks]);
  const auto right = matrix_descriptor<Major::mn>(values, GroupBytes).opaque();
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Count; ++step) {
    const auto& left = weights[First + step];
    const bool onto = step > 0 || accumulate;
    wgmma_registers<Element, Major::mn>(first, left, right + step * kK16BytesAcross, onto);
    wgmma_registers<Element, Major::mn>(
        second, left, right + (step * kK16BytesAcross + groups * GroupBytes), onto);
  }
  wgmma_commit();
}

}  // namespace autofa
