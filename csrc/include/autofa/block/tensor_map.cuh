// Host side of TMA: the maps that tell a kernel's copies where the rows of a call's tensors lie.
//
// To make one touches no device, and it is part of the launch's parameters, so that each launch
// makes its own: under stream capture too.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "autofa/abi.h"
#include "autofa/arch/tma.cuh"

namespace autofa {

// cuTensorMapEncodeTiled and the values of its enums that are used here, as the driver's <cuda.h>
// has them, which is not included for them alone: it takes longer to compile than a kernel.
using TensorMapEncoder = int (*)(TensorMap* map, int type, uint32_t rank, void* base,
                                 const uint64_t* sizes, const uint64_t* strides,
                                 const uint32_t* box, const uint32_t* steps, int interleave,
                                 int swizzle, int promotion, int fill);
constexpr int kTensorMapF16 = 6, kTensorMapBf16 = 9, kTensorMapSwizzle128 = 3,
              kTensorMapPromote256 = 3;

// The driver's, asked for at run time: a variant is not linked to the driver. Null if it has none.
inline TensorMapEncoder tensor_map_encoder() {
  static const TensorMapEncoder encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) cudaGetLastError();
    const bool there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return there ? reinterpret_cast<TensorMapEncoder>(found) : nullptr;
  }();
  return encoder;
}

// A tensor of a call: 16-bit elements, strides of batch, head and row in elements.
struct TensorRows {
  const void* base;
  const int64_t (&strides)[3];
  int64_t batch, heads, rows, columns;
};

// Makes the map by which tma_load(column, row, head, batch) copies `box_rows` rows of 64 columns,
// swizzled as wgmma reads them; columns, rows and heads that do not exist arrive as zeros. With
// `box_groups` it is tma_load(0, row, group, head, batch), which copies so many groups of 64
// columns, one after the other, of a multiple of 64 columns. False where the tensor is empty, or
// lies as TMA cannot read it: every stride in multiples of 16 bytes below 2^40, and the base
// aligned to 16.
inline bool make_tensor_map(TensorMap& map, int dtype, const TensorRows& tensor, int box_rows,
                            int box_groups = 0) {
  const TensorMapEncoder encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const uint64_t rows = static_cast<uint64_t>(tensor.rows),
                 columns = static_cast<uint64_t>(tensor.columns);
  // Where there is one row, head or batch, its stride leads nowhere and may be anything.
  const auto stride = [&](int dimension, int64_t size) {
    return size == 1 ? uint64_t{16} : static_cast<uint64_t>(tensor.strides[dimension]) * 2;
  };
  const bool grouped = box_groups > 0;
  const uint64_t sizes[5] = {grouped ? 64 : columns, rows,
                             grouped ? columns / 64 : static_cast<uint64_t>(tensor.heads),
                             static_cast<uint64_t>(grouped ? tensor.heads : tensor.batch),
                             static_cast<uint64_t>(tensor.batch)};
  const uint64_t row = stride(2, tensor.rows), head = stride(1, tensor.heads),
                 batch = stride(0, tensor.batch);
  const uint64_t strides[4] = {row, grouped ? 128 : head, grouped ? head : batch, batch};
  const uint32_t box[5] = {64, static_cast<uint32_t>(box_rows),
                           static_cast<uint32_t>(grouped ? box_groups : 1), 1, 1};
  constexpr uint32_t steps[5] = {1, 1, 1, 1, 1};
  return encode(&map, dtype == AUTOFA_F16 ? kTensorMapF16 : kTensorMapBf16, grouped ? 5 : 4,
                const_cast<void*>(tensor.base), sizes, strides, box, steps, 0, kTensorMapSwizzle128,
                kTensorMapPromote256, 0) == 0;
}

}  // namespace autofa
