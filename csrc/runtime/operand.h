// Operands as other libraries' kernels take them: 4-D, padded, heads expanded.
#pragma once

#include "call.h"

namespace autofa::runtime {

struct Operand {
  Handle handle;
  int64_t sizes[4];
  int64_t strides[4];
};

Handle view(AtenTensorHandle tensor, int64_t rank, const int64_t* sizes, const int64_t* strides);

// Four dims from three or four, without a handle.
Operand geometry(int64_t rank, const int64_t* sizes, const int64_t* strides);

// New zeros of these sizes, contiguous, on the tensor's device.
Handle zeros(int64_t rank, const int64_t* sizes, int32_t dtype, const Tensor& like);

// Puts a dense copy, of that dtype, in the tensor's place.
void copy(Tensor& tensor, int32_t dtype);

// Whether its rows begin within one another, which are no matrix to BLAS. Heads and batches may
// have a stride of 0.
bool rows_overlap(const Tensor& tensor);

// Of one number.
int64_t bytes_of(int32_t dtype);

// Whether it starts, or a row of it, at no multiple of 16 bytes where a copy would. torch's fused
// CUDA kernels do not ask: cuDNN gives wrong values, the efficient one a CUDA error, and raises for
// the strides of sizes of 1 too.
bool off_grid(const Tensor& tensor);

// Takes the tensor's handle.
Operand operand(Tensor& tensor);

// A new tensor of these sizes; fills the strides.
Handle contiguous(const int64_t (&sizes)[4], int64_t (&strides)[4], const Tensor& like);

// Zeros up to a head dim that is a multiple of 8.
void pad(Operand& operand, const Tensor& like);

// (batch, heads / groups, groups, rows, columns); `groups` of 1 broadcasts.
Handle grouped(const Operand& operand, int64_t groups);

// Each head repeated `groups` times, since no strides can say so.
void expand_heads(Operand& operand, int64_t groups, const Tensor& like);

}  // namespace autofa::runtime
