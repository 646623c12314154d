// What a kernel that reads by TMA is launched with: the call, and the maps of its tensors.
#pragma once

#include "autofa/abi.h"
#include "autofa/arch/tma.cuh"

namespace autofa {

struct MappedCall {
  TensorMap q, k, v;
  autofa_params call;
};

// Copies `Groups` groups of 64 columns of a map's rows, from the group `first` on, each to where
// the one before it ends. With BoxGroups, as many as the map was made for, one copy brings so many.
template <int Groups, int BoxGroups, int GroupBytes>
__device__ __forceinline__ void load_groups(uint32_t target, const TensorMap& map, uint32_t full,
                                            int first_column, int row, int head, int batch) {
  if constexpr (BoxGroups > 0) {
    static_assert(Groups == BoxGroups);
    tma_load(target, map, full, 0, row, first_column / 64, head, batch);
  } else {
#pragma unroll 1
    for (int group = 0; group < Groups; ++group) {
      tma_load(target + group * GroupBytes, map, full, first_column + group * 64, row, head, batch);
    }
  }
}

}  // namespace autofa
