// The vendor kernels as aten ops; what SDPA does around its single backends (padding, grouped
// heads, masks) is done here.
#include "vendor.h"

#include <torch/csrc/stable/version.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "cuda_backends.h"

// From torch 2.13 on; the address is null under older ones.
extern "C" const char* torch_exception_get_what_without_backtrace() __attribute__((weak));

namespace autofa::runtime {

void throw_torch_failure(const char* what) {
  std::string text = std::string("torch failed at ") + what;
  if (torch_exception_get_what_without_backtrace != nullptr) {
    text += std::string(": ") + torch_exception_get_what_without_backtrace();
  }
  throw std::runtime_error(text);
}

namespace {

// ---- boxing for the dispatcher: each value becomes a 64-bit word that the callee takes over ----

uint64_t word(bool value) { return value; }
uint64_t word(int64_t value) { return static_cast<uint64_t>(value); }
uint64_t word(Handle handle) { return reinterpret_cast<uint64_t>(handle.release()); }
uint64_t word(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
template <class T>
uint64_t optional_word(T value) {
  return reinterpret_cast<uint64_t>(new uint64_t(word(std::move(value))));
}
constexpr uint64_t kNone = 0;

// Calls an op with `stack` as its arguments, which has room for its `results`, all tensors; gives
// the first of them.
template <size_t N>
Handle call_op(const char* name, const char* overload, uint64_t (&stack)[N], size_t results = 1) {
  // The version whose schemas these stacks are written for, so that a later torch can adapt them.
  check(torch_call_dispatcher(name, overload, stack, TORCH_TARGET_VERSION), name);
  for (size_t i = 1; i < results; ++i) Handle(reinterpret_cast<AtenTensorHandle>(stack[i]));
  return Handle(reinterpret_cast<AtenTensorHandle>(stack[0]));
}

Handle scalar(double value) {
  Handle tensor;
  check(aoti_torch_scalar_to_tensor_float32(static_cast<float>(value), tensor.receive()),
        "making a scalar");
  return tensor;
}

Handle view(AtenTensorHandle tensor, int64_t rank, const int64_t* sizes, const int64_t* strides) {
  Handle other;
  check(aoti_torch__reinterpret_tensor(tensor, rank, sizes, strides, 0, other.receive()),
        "viewing a tensor");
  return other;
}

// ---- masks ----

// (Nq, Nk), True where a causal call may look.
Handle causal_mask(const Call& call) {
  const int64_t sizes[] = {call.q.size(2), call.k.size(2)};
  const int64_t strides[] = {sizes[1], 1};
  Handle mask;
  check(aoti_torch_empty_strided(2, sizes, strides, codes.boolean, call.q.device_type,
                                 call.q.device_index, mask.receive()),
        "allocating a mask");
  check(aoti_torch_zero_(mask.get()), "filling a mask");
  uint64_t negate[] = {word(std::move(mask))};
  mask = call_op("aten::logical_not", "", negate);
  uint64_t lower[] = {word(std::move(mask)),
                      word(call.lower_right ? sizes[1] - sizes[0] : int64_t{0})};
  return call_op("aten::tril", "", lower);
}

Handle where(Handle condition, Handle chosen, Handle other) {
  uint64_t stack[] = {word(std::move(condition)), word(std::move(chosen)), word(std::move(other))};
  return call_op("aten::where", "self", stack);
}

Handle minus_infinity() { return scalar(-std::numeric_limits<double>::infinity()); }

// The one mask that says what attn_mask and is_causal say together; takes the call's mask.
Handle merged_mask(Call& call) {
  if (!call.causal) return std::move(call.mask.handle);
  Handle triangle = causal_mask(call);
  if (!call.has_mask) return triangle;
  if (call.mask.dtype != codes.boolean) {
    return where(std::move(triangle), std::move(call.mask.handle), minus_infinity());
  }
  uint64_t both[] = {word(std::move(triangle)), word(std::move(call.mask.handle))};
  return call_op("aten::logical_and", "", both);
}

// ---- operands as the single backends take them: 4-D, padded, heads expanded ----

struct Operand {
  Handle handle;
  int64_t sizes[4];
  int64_t strides[4];
};

Operand operand(Tensor& tensor) {
  Operand result{std::move(tensor.handle), {1, 0, 0, 0}, {0, 0, 0, 0}};
  const int skip = 4 - static_cast<int>(tensor.rank);
  std::memcpy(result.sizes + skip, tensor.sizes, tensor.rank * sizeof(int64_t));
  std::memcpy(result.strides + skip, tensor.strides, tensor.rank * sizeof(int64_t));
  if (skip == 0) return result;
  result.strides[0] = result.sizes[1] * result.strides[1];
  result.handle = view(result.handle.get(), 4, result.sizes, result.strides);
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

// Zeros up to a head dim that is a multiple of 8.
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

// (batch, heads / groups, groups, rows, columns); `groups` of 1 broadcasts.
Handle grouped(const Operand& operand, int64_t groups) {
  const int64_t* n = operand.sizes;
  const int64_t* s = operand.strides;
  const int64_t sizes[] = {n[0], n[1] / groups, groups, n[2], n[3]};
  const int64_t strides[] = {s[0], s[1] * groups, s[1], s[2], s[3]};
  return view(operand.handle.get(), 5, sizes, strides);
}

// Each head repeated `groups` times, since no strides can say so.
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

// The output of a backend in the call's rank and head dim.
Handle as_output(const Call& call, Handle result) {
  if (call.q.rank == 4 && call.q.size(1) % 8 == 0) return result;
  int64_t* strides;
  check(aoti_torch_get_strides(result.get(), &strides), "reading strides");
  return view(result.get(), call.q.rank, call.out_sizes, strides + (4 - call.q.rank));
}

// ---- the kernels ----

const char* square_if_causal(const Call& call) {
  if (call.has_mask) return "it is called without attn_mask";
  if (call.lower_right || (call.causal && call.q.size(2) != call.k.size(2))) {
    return "its causal corner is another one unless seqlen_q == seqlen_k";
  }
  return nullptr;
}

const char* upper_left(const Call& call) {
  if (call.has_mask) return "it is called without attn_mask";
  return call.lower_right ? "its causal corner is the upper-left one" : nullptr;
}

const char* equal_head_dims(const Call& call) {
  return call.q.size(1) == call.v.size(1) ? nullptr : "it needs head_dim == head_dim_v";
}

const char* no_refusal(const Call&) { return nullptr; }

const char* flash_refusal(const Call& call) {
  if (const char* why = equal_head_dims(call)) return why;
  if (call.on_cuda()) return square_if_causal(call);
  return call.lower_right ? "its causal corner is the upper-left one" : nullptr;
}

const char* efficient_refusal(const Call& call) {
  return call.on_cuda() ? upper_left(call) : "it runs on cuda only";
}

const char* cudnn_refusal(const Call& call) {
  if (!call.on_cuda()) return "it runs on cuda only";
  if (const char* why = equal_head_dims(call)) return why;
  return square_if_causal(call);
}

uint64_t scale_word(const Call& call) { return optional_word(call.scale); }

Handle run_flash_cpu(Call& call) {
  Operand q = operand(call.q), k = operand(call.k), v = operand(call.v);
  uint64_t mask = kNone;
  if (call.has_mask) {
    Handle bias = std::move(call.mask.handle);
    if (call.mask.dtype == codes.boolean)
      bias = where(std::move(bias), scalar(0), minus_infinity());
    mask = optional_word(std::move(bias));
  }
  uint64_t stack[] = {word(std::move(q.handle)), word(std::move(k.handle)),
                      word(std::move(v.handle)), word(0.0),
                      word(call.causal),         mask,
                      scale_word(call)};
  return as_output(call,
                   call_op("aten::_scaled_dot_product_flash_attention_for_cpu", "", stack, 2));
}

Handle run_flash(Call& call) {
  if (!call.on_cuda()) return run_flash_cpu(call);
  Operand q = operand(call.q), k = operand(call.k), v = operand(call.v);
  pad(q, call.q);
  pad(k, call.k);
  pad(v, call.v);
  return as_output(
      call, cuda_flash(q.handle.get(), k.handle.get(), v.handle.get(), call.causal, call.scale));
}

Handle run_efficient(Call& call) {
  Operand q = operand(call.q), k = operand(call.k), v = operand(call.v);
  const int64_t groups = q.sizes[1] / k.sizes[1];
  expand_heads(k, groups, call.k);
  expand_heads(v, groups, call.v);
  uint64_t stack[] = {word(std::move(q.handle)),
                      word(std::move(k.handle)),
                      word(std::move(v.handle)),
                      kNone,
                      word(false),
                      word(0.0),
                      word(call.causal),
                      scale_word(call)};
  return as_output(call, call_op("aten::_scaled_dot_product_efficient_attention", "", stack, 4));
}

Handle run_cudnn(Call& call) {
  Operand q = operand(call.q), k = operand(call.k), v = operand(call.v);
  return as_output(
      call, cuda_cudnn(q.handle.get(), k.handle.get(), v.handle.get(), call.causal, call.scale));
}

Handle matmul(Handle a, Handle b) {
  uint64_t stack[] = {word(std::move(a)), word(std::move(b))};
  return call_op("aten::matmul", "", stack);
}

Handle run_unfused(Call& call) {
  Operand q = operand(call.q), v = operand(call.v);
  Operand k = operand(call.k);
  std::swap(k.sizes[2], k.sizes[3]);
  std::swap(k.strides[2], k.strides[3]);
  const int64_t groups = q.sizes[1] / k.sizes[1];
  uint64_t scaling[] = {word(grouped(q, groups)), word(scalar(call.scale))};
  Handle scores = matmul(call_op("aten::mul", "Tensor", scaling), grouped(k, 1));
  if (call.causal) scores = where(causal_mask(call), std::move(scores), minus_infinity());
  uint64_t softmax[] = {word(std::move(scores)), word(int64_t{-1}), word(false)};
  Handle out = matmul(call_op("aten::_softmax", "", softmax), grouped(v, 1));
  int64_t* s;
  check(aoti_torch_get_strides(out.get(), &s), "reading strides");
  // matmul gives (batch, key heads, groups, rows, head dim), contiguous.
  const int64_t strides[] = {s[0], s[2], s[3], s[4]};
  return view(out.get(), call.q.rank, call.out_sizes, strides + (4 - call.q.rank));
}

// SDPA itself; is_causal and attn_mask merged where both are given, since its backends differ.
Handle run_sdpa(Call& call) {
  const bool merge = call.causal && (call.has_mask || call.lower_right);
  const bool masked = merge || call.has_mask;
  uint64_t mask = kNone;
  if (masked) mask = optional_word(merge ? merged_mask(call) : std::move(call.mask.handle));
  uint64_t stack[] = {word(std::move(call.q.handle)),
                      word(std::move(call.k.handle)),
                      word(std::move(call.v.handle)),
                      mask,
                      word(0.0),
                      word(call.causal && !merge),
                      call.has_scale ? optional_word(call.scale) : kNone,
                      word(call.gqa)};
  return call_op("aten::scaled_dot_product_attention", "", stack);
}

constexpr Vendor kVendors[] = {
    {"torch.sdpa", no_refusal, run_sdpa},
    {"torch.flash", flash_refusal, run_flash},
    {"torch.efficient", efficient_refusal, run_efficient},
    {"torch.cudnn", cudnn_refusal, run_cudnn},
    {"torch.unfused", upper_left, run_unfused},
};

// torch's fused kernels mask before they scale and take the largest unscaled score as the largest:
// with a scale of 0 or less their causal rows are NaN (seen with torch 2.13 on CPU, SDPA included)
// and large scores overflow. The sign goes into the query instead.
void make_scale_positive(Call& call) {
  if (call.scale > 0 || !call.has_scale) return;
  uint64_t stack[] = {word(std::move(call.q.handle)), word(scalar(call.scale < 0 ? -1 : 0))};
  call.q.handle = call_op("aten::mul", "Tensor", stack);
  call.q.read();
  call.scale = call.scale < 0 ? -call.scale : 1;
}

}  // namespace

Handle run_vendor(const Vendor& vendor, Call& call) {
  make_scale_positive(call);
  return call.with_output_strides(vendor.launch(call));
}

Handle times_nan(Handle tensor) {
  uint64_t stack[] = {word(std::move(tensor)), word(scalar(std::nan("")))};
  return call_op("aten::mul", "Tensor", stack);
}

const Vendor* find_vendor(const std::string& slug) {
  for (const Vendor& vendor : kVendors) {
    if (slug == vendor.slug) return &vendor;
  }
  return nullptr;
}

}  // namespace autofa::runtime
