// Views and copies of a call's tensors.
#include "operand.h"

#include <cstring>
#include <utility>

namespace autofa::runtime {

Handle view(AtenTensorHandle tensor, int64_t rank, const int64_t* sizes, const int64_t* strides) {
  Handle other;
  check(aoti_torch__reinterpret_tensor(tensor, rank, sizes, strides, 0, other.receive()),
        "viewing a tensor");
  return other;
}

Operand geometry(int64_t rank, const int64_t* sizes, const int64_t* strides) {
  Operand result{{}, {1, 0, 0, 0}, {0, 0, 0, 0}};
  const int skip = 4 - static_cast<int>(rank);
  std::memcpy(result.sizes + skip, sizes, rank * sizeof(int64_t));
  std::memcpy(result.strides + skip, strides, rank * sizeof(int64_t));
  if (skip != 0) result.strides[0] = result.sizes[1] * result.strides[1];
  return result;
}

Handle zeros(int64_t rank, const int64_t* sizes, int32_t dtype, const Tensor& like) {
  int64_t strides[kMaxRank], stride = 1;
  for (int64_t i = rank; i-- > 0; stride *= sizes[i]) strides[i] = stride;
  Handle fresh;
  check(aoti_torch_empty_strided(rank, sizes, strides, dtype, like.device_type, like.device_index,
                                 fresh.receive()),
        "allocating zeros");
  check(aoti_torch_zero_(fresh.get()), "filling zeros");
  return fresh;
}

void copy(Tensor& tensor, int32_t dtype) {
  int64_t strides[kMaxRank], stride = 1;
  for (int64_t i = tensor.rank; i-- > 0; stride *= tensor.sizes[i]) strides[i] = stride;
  Handle fresh;
  check(aoti_torch_empty_strided(tensor.rank, tensor.sizes, strides, dtype, tensor.device_type,
                                 tensor.device_index, fresh.receive()),
        "allocating a copy");
  check(aoti_torch_copy_(fresh.get(), tensor.handle.get(), 0), "copying a tensor");
  tensor.handle = std::move(fresh);
  tensor.read();
}

bool rows_overlap(const Tensor& tensor) {
  const int64_t width = tensor.size(1), last = tensor.rank - 1;
  if (width > 1 && tensor.strides[last] != 1) return false;
  for (int64_t i = 0; i < last; ++i) {
    const bool expanded = tensor.strides[i] == 0 && i != last - 1;
    if (tensor.sizes[i] > 1 && tensor.strides[i] < width && !expanded) return true;
  }
  return false;
}

int64_t bytes_of(int32_t dtype) { return dtype == codes.f64 ? 8 : dtype == codes.f32 ? 4 : 2; }

bool off_grid(const Tensor& tensor) {
  const int64_t bytes = bytes_of(tensor.dtype);
  if ((reinterpret_cast<uintptr_t>(tensor.data) & 15) != 0) return true;
  const int64_t last = tensor.rank - 1;
  if (tensor.sizes[last] * bytes % 16 != 0 || tensor.strides[last] != 1) return false;
  for (int64_t i = 0; i < last; ++i) {
    if (tensor.strides[i] * bytes % 16 != 0) return true;
  }
  return false;
}

Operand operand(Tensor& tensor) {
  Operand result = geometry(tensor.rank, tensor.sizes, tensor.strides);
  result.handle = tensor.rank == 4 ? std::move(tensor.handle)
                                   : view(tensor.handle.get(), 4, result.sizes, result.strides);
  return result;
}

Handle contiguous(const int64_t (&sizes)[4], int64_t (&strides)[4], const Tensor& like) {
  strides[3] = 1;
  for (int i = 3; i-- > 0;) strides[i] = strides[i + 1] * sizes[i + 1];
  Handle fresh;
  check(aoti_torch_empty_strided(4, sizes, strides, like.dtype, like.device_type, like.device_index,
                                 fresh.receive()),
        "allocating an operand");
  return fresh;
}

void pad(Operand& operand, const Tensor& like) {
  if (operand.sizes[3] % 8 == 0) return;
  int64_t sizes[4], strides[4];
  std::memcpy(sizes, operand.sizes, sizeof(sizes));
  sizes[3] = (sizes[3] + 7) / 8 * 8;
  Handle fresh = contiguous(sizes, strides, like);
  check(aoti_torch_zero_(fresh.get()), "padding an operand");
  Handle inner = view(fresh.get(), 4, operand.sizes, strides);
  check(aoti_torch_copy_(inner.get(), operand.handle.get(), 0), "copying an operand");
  std::memcpy(operand.sizes, sizes, sizeof(sizes));
  std::memcpy(operand.strides, strides, sizeof(strides));
  operand.handle = std::move(fresh);
}

Handle grouped(const Operand& operand, int64_t groups) {
  const int64_t* n = operand.sizes;
  const int64_t* s = operand.strides;
  const int64_t sizes[] = {n[0], n[1] / groups, groups, n[2], n[3]};
  const int64_t strides[] = {s[0], s[1] * groups, s[1], s[2], s[3]};
  return view(operand.handle.get(), 5, sizes, strides);
}

void expand_heads(Operand& operand, int64_t groups, const Tensor& like) {
  if (groups == 1) return;
  Operand fresh{{}, {}, {}};
  std::memcpy(fresh.sizes, operand.sizes, sizeof(fresh.sizes));
  fresh.sizes[1] *= groups;
  fresh.handle = contiguous(fresh.sizes, fresh.strides, like);
  Handle target = grouped(fresh, groups);
  Handle source = grouped(operand, 1);
  check(aoti_torch_copy_(target.get(), source.get(), 0), "repeating key heads");
  operand = std::move(fresh);
}

}  // namespace autofa::runtime
