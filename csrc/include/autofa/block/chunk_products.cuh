// The products of attention over one chunk of a ring, left under way: the caller waits for them.
#pragma once

#include <cstdint>

#include "autofa/arch/matrix_descriptor.cuh"
#include "autofa/arch/wgmma.cuh"

namespace autofa {

// scores (+)= q k^T over the head dim's steps of 16 columns from First up to End; the first of all
// begins the sums. Queries and keys lie in groups of 64 columns: `queries` is the first of all
// groups, `keys` the chunk, which begins with step First.
template <class Element, int First, int End, int QueryGroupBytes, int KeyGroupBytes, int Blocks>
__device__ __forceinline__ void multiply_key_chunk(float (&scores)[Blocks][4], uint32_t queries,
                                                   uint32_t keys) {
  const auto right = matrix_descriptor<Major::k>(keys).opaque();
  const auto left = matrix_descriptor<Major::k>(queries).opaque();
  wgmma_fence();
#pragma unroll
  for (int step = First; step < End; ++step) {
    const int along = step % 4 * kK16BytesAlongK;
    wgmma_shared<Element, Major::k>(scores, left + (step / 4 * QueryGroupBytes + along),
                                    right + ((step - First) / 4 * KeyGroupBytes + along), step > 0);
  }
  wgmma_commit();
}

// out (+)= p v over the keys of one chunk, 16 by 16, whose weights begin with square First. Each 16
// keys lie StepBytes after the 16 before them.
template <class Element, int First, int Count, int GroupBytes, int StepBytes = kK16BytesAcross,
          int Blocks, int Squares>
__device__ __forceinline__ void multiply_value_chunk(float (&out)[Blocks][4],
                                                     const uint32_t (&weights)[Squares][4],
                                                     uint32_t values, bool accumulate) {
  const auto right = matrix_descriptor<Major::mn>(values, GroupBytes).opaque();
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Count; ++step) {
    wgmma_registers<Element, Major::mn>(out, weights[First + step], right + step * StepBytes,
                                        step > 0 || accumulate);
  }
  wgmma_commit();
}

}  // namespace autofa
