// Kernels of Python libraries, each behind an operator in Python of one and the same schema:
// (Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, float scale, bool causal) -> bool
#include "libraries.h"

#include <cstring>
#include <utility>

#include "boxing.h"
#include "operand.h"

namespace autofa::runtime {
namespace {

// Whether a library that loads 16 bytes at a time can read it. One that is padded is a copy.
bool readable(const Tensor& tensor) {
  if (tensor.size(1) % 8 != 0) return true;
  uint64_t bits = reinterpret_cast<uintptr_t>(tensor.data);
  for (int64_t i = 0; i + 1 < tensor.rank; ++i) {
    if (tensor.sizes[i] > 1) bits |= static_cast<uint64_t>(tensor.strides[i]) * 2;
  }
  return bits % 16 == 0;
}

bool broadcasts(const Tensor& tensor) {
  for (int64_t i = 0; i < tensor.rank; ++i) {
    if (tensor.sizes[i] > 1 && tensor.strides[i] == 0) return true;
  }
  return false;
}

// What these libraries have in common. A copy could mend strides, but costs more than another
// kernel where it matters, with few queries.
const char* common_refusal(const Call& call) {
  if (call.has_mask) return "it is called without attn_mask";
  if (!readable(call.q) || !readable(call.k) || !readable(call.v)) {
    return "it needs base pointers and strides that are multiples of 16 bytes";
  }
  if (broadcasts(call.q) || broadcasts(call.k) || broadcasts(call.v)) {
    return "it is called without strides of 0";
  }
  return nullptr;
}

}  // namespace

const char* lower_right_refusal(const Call& call) {
  if (call.causal && !call.lower_right && call.q.size(2) != call.k.size(2)) {
    return "its causal corner is the lower-right one";
  }
  return common_refusal(call);
}

const char* no_empty_rows_refusal(const Call& call) {
  if (call.lower_right && call.q.size(2) > call.k.size(2)) {
    return "it does not vouch for rows with nothing to attend to";
  }
  return lower_right_refusal(call);
}

const char* square_causal_refusal(const Call& call) {
  if (call.causal && call.q.size(2) != call.k.size(2)) return "causal needs seqlen_q == seqlen_k";
  return common_refusal(call);
}

namespace {

// A view in the order that a library wants.
Handle ordered(const Operand& operand, bool heads_first) {
  int64_t sizes[4], strides[4];
  std::memcpy(sizes, operand.sizes, sizeof(sizes));
  std::memcpy(strides, operand.strides, sizeof(strides));
  for (int i = 0; i < 3; ++i) {
    // A dim of size 1 may bear any stride, and TMA descriptors want multiples of 16 bytes.
    if (sizes[i] == 1) strides[i] = sizes[3];
  }
  if (!heads_first) {
    std::swap(sizes[1], sizes[2]);
    std::swap(strides[1], strides[2]);
  }
  return view(operand.handle.get(), 4, sizes, strides);
}

// A view, padded if need be: the call keeps its tensors, since the library may decline.
Operand shared(const Tensor& tensor) {
  Operand result = geometry(tensor.rank, tensor.sizes, tensor.strides);
  result.handle = view(tensor.handle.get(), 4, result.sizes, result.strides);
  pad(result, tensor);
  return result;
}

}  // namespace

Handle run_operator(const Vendor& vendor, Call& call, Handle* lse) {
  const Operand q = shared(call.q), k = shared(call.k), v = shared(call.v);
  Operand out = geometry(call.q.rank, call.out_sizes, call.out_strides);
  const bool wider = out.sizes[3] % 8 != 0;
  if (wider) out.sizes[3] = v.sizes[3];
  out.handle = wider ? contiguous(out.sizes, out.strides, call.q) : call.empty_output();
  uint64_t logsumexp = kNone;
  if (lse != nullptr) {
    *lse = call.empty_lse();
    const int64_t sizes[] = {out.sizes[0], out.sizes[1], out.sizes[2]};
    const int64_t strides[] = {sizes[1] * sizes[2], sizes[2], 1};
    logsumexp = optional_word(view(lse->get(), 3, sizes, strides));
  }
  uint64_t stack[] = {word(ordered(q, vendor.heads_first)),
                      word(ordered(k, vendor.heads_first)),
                      word(ordered(v, vendor.heads_first)),
                      word(ordered(out, vendor.heads_first)),
                      logsumexp,
                      word(call.scale),
                      word(call.causal)};
  check(torch_call_dispatcher(vendor.op, "", stack, TORCH_TARGET_VERSION), vendor.op);
  const bool served = (stack[0] & 0xff) != 0;
  if (!served) return {};
  if (!wider) return std::move(out.handle);
  return view(out.handle.get(), call.q.rank, call.out_sizes, out.strides + (4 - call.q.rank));
}

}  // namespace autofa::runtime
