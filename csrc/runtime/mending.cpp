#include "mending.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "boxing.h"
#include "operand.h"

namespace autofa::runtime {
namespace {

constexpr int64_t kCudnn = 3;  // of SDPBackend

Handle another(const Handle& handle) {
  Handle fresh;
  check(aoti_torch_new_tensor_handle(handle.get(), fresh.receive()), "sharing a tensor");
  return fresh;
}

// What SDPA would choose.
int64_t choice(const Call& call, const Handle& mask) {
  uint64_t stack[] = {word(another(call.q.handle)),
                      word(another(call.k.handle)),
                      word(another(call.v.handle)),
                      optional_word(another(mask)),
                      word(0.0),
                      word(false),
                      call.has_scale ? optional_word(call.scale) : kNone,
                      word(call.gqa)};
  check(torch_call_dispatcher("aten::_fused_sdp_choice", "", stack, TORCH_TARGET_VERSION),
        "asking SDPA for its choice");
  return static_cast<int64_t>(stack[0]);
}

// The mask with every key of a row side by side, and numbers in it from a multiple of 16 bytes on;
// what it repeats otherwise stays as it is.
void widen(Tensor& mask, int64_t keys) {
  const int64_t last = mask.rank - 1;
  if (mask.rank == 0) return;
  int64_t sizes[kMaxRank], strides[kMaxRank];
  bool dense = true, aligned = reinterpret_cast<uintptr_t>(mask.data) % 16 == 0;
  const bool on_grid = aligned;
  int64_t next = keys;
  for (int64_t i = last; i-- > 0;) {
    sizes[i] = mask.strides[i] == 0 ? std::min<int64_t>(1, mask.sizes[i]) : mask.sizes[i];
    strides[i] = mask.strides[i];
    if (sizes[i] > 1) dense &= strides[i] == next;
    aligned &= strides[i] * bytes_of(mask.dtype) % 16 == 0;
    next *= sizes[i];
  }
  const bool whole = mask.sizes[last] == keys && (keys == 1 || mask.strides[last] == 1);
  if (whole && (mask.dtype == codes.boolean || aligned || (dense && on_grid))) return;
  sizes[last] = keys;
  strides[last] = mask.sizes[last] == 1 ? 0 : mask.strides[last];
  mask.handle = view(mask.handle.get(), mask.rank, sizes, strides);
  mask.read();
  copy(mask, mask.dtype);
}

}  // namespace

Handle scalar(double value) {
  Handle tensor;
  check(aoti_torch_scalar_to_tensor_float32(static_cast<float>(value), tensor.receive()),
        "making a scalar");
  return tensor;
}

Handle where(Handle condition, Handle chosen, Handle other) {
  uint64_t stack[] = {word(std::move(condition)), word(std::move(chosen)), word(std::move(other))};
  return call_op("aten::where", "self", stack);
}

namespace {

// torch's cuDNN backend returns no tensor at all for a head dim of 0 (2.11): its scores are those
// of zeros.
void give_a_head_dim(Tensor& tensor) {
  int64_t sizes[kMaxRank];
  std::copy_n(tensor.sizes, tensor.rank, sizes);
  sizes[tensor.rank - 1] = 8;
  tensor.handle = zeros(tensor.rank, sizes, tensor.dtype, tensor);
  tensor.read();
}

// The query with the leading dims of the output: torch adds a mask to scores of the query's and
// key's dims in place, and raises where the mask has more.
void spread(Call& call) {
  Tensor& query = call.q;
  const int64_t rank = std::max(query.rank, std::max(call.k.rank, call.v.rank));
  const int64_t missing = rank - query.rank;
  int64_t sizes[kMaxRank], strides[kMaxRank];
  bool wider = missing > 0;
  for (int64_t i = 0; i < rank; ++i) {
    const int64_t own = i < missing ? 1 : query.sizes[i - missing];
    sizes[i] = i < rank - 2 ? call.out_sizes[i] : own;
    strides[i] = i >= missing && sizes[i] == own ? query.strides[i - missing] : 0;
    wider |= sizes[i] != own;
  }
  if (!wider) return;
  query.handle = view(query.handle.get(), rank, sizes, strides);
  query.read();
}

}  // namespace

// Queries whose rows overlap in memory, in bf16 also one key expanded along the length (seen with
// torch 2.13 on CPU); a mask in f32, read as f64 where the query is f64. On CUDA (2.11) tensors
// that are off the grid, masks in f32 with a query of 16 bits, and masks whose last dim is expanded
// or strided or that lie anyhow: one backend raises, cuDNN reads at addresses that are no multiple
// of 4 bytes.
void mend(Call& call) {
  for (Tensor* tensor : {&call.q, &call.k, &call.v}) {
    if (rows_overlap(*tensor) || (call.on_cuda() && off_grid(*tensor))) {
      copy(*tensor, tensor->dtype);
    }
  }
  if (call.on_cuda() && call.q.size(1) == 0) {
    give_a_head_dim(call.q);
    give_a_head_dim(call.k);
  }
  if (!call.has_mask) return;
  if (!call.gqa) spread(call);
  if (call.on_cuda()) widen(call.mask, call.k.size(2));
  const bool narrow = call.on_cuda() && call.q.dtype != codes.f32;
  if (call.mask.dtype == codes.f32 && (narrow || call.q.dtype == codes.f64)) {
    copy(call.mask, call.q.dtype);
  }
}

void make_scale_positive(Call& call) {
  // One that f32 does not hold in full is 0 to cuDNN, and NaN where it meets a hidden score.
  const double smallest = call.q.dtype == codes.f64 ? 0.0 : std::numeric_limits<float>::min();
  if (!call.has_scale || !(call.scale < smallest || call.scale <= 0)) return;
  const bool none = std::abs(call.scale) < smallest || call.scale == 0;
  uint64_t stack[] = {word(another(call.q.handle)), word(scalar(none ? 0 : -1))};
  call.q.handle = call_op("aten::mul", "Tensor", stack);
  call.q.read();
  call.scale = none ? 1 : -call.scale;
}

Handle rows_to_keep(const Call& call, const Handle& mask) {
  if (!mask || !call.on_cuda() || choice(call, mask) != kCudnn) return {};
  int32_t dtype;
  check(aoti_torch_get_dtype(mask.get(), &dtype), "reading a dtype");
  if (dtype == codes.boolean) {
    uint64_t any[] = {word(another(mask)), word(int64_t{-1}), word(true)};
    return call_op("aten::any", "dim", any);
  }
  uint64_t hidden[] = {word(another(mask))};
  uint64_t all[] = {word(call_op("aten::isneginf", "", hidden)), word(int64_t{-1}), word(true)};
  uint64_t negate[] = {word(call_op("aten::all", "dim", all))};
  return call_op("aten::logical_not", "", negate);
}

}  // namespace autofa::runtime
