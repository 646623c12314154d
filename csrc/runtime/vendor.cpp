// The vendor kernels as operators of torch's dispatcher; what SDPA does around its single backends
// (padding, grouped heads, masks), and what other libraries expect, is done here.
#include "vendor.h"

#include <cmath>
#include <limits>
#include <stdexcept>

#include "boxing.h"
#include "cuda_backends.h"
#include "guard.h"
#include "libraries.h"
#include "mending.h"
#include "operand.h"

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

// ---- masks ----

// (Nq, Nk), True where a causal call may look.
Handle causal_mask(const Call& call) {
  const int64_t sizes[] = {call.q.size(2), call.k.size(2)};
  Handle mask = zeros(2, sizes, codes.boolean, call.q);
  uint64_t negate[] = {word(std::move(mask))};
  mask = call_op("aten::logical_not", "", negate);
  uint64_t lower[] = {word(std::move(mask)),
                      word(call.lower_right ? sizes[1] - sizes[0] : int64_t{0})};
  return call_op("aten::tril", "", lower);
}

// 0 or minus infinity for `where`, which copies a number of the host to a GPU and waits for it:
// slow, and the end of a capture.
Handle zero(const Call& call) {
  return call.on_cuda() ? zeros(0, nullptr, codes.f32, call.q) : scalar(0);
}

Handle minus_infinity(const Call& call) {
  if (!call.on_cuda()) return scalar(-std::numeric_limits<double>::infinity());
  uint64_t stack[] = {word(zero(call))};
  return call_op("aten::log", "", stack);
}

// The one mask that says what attn_mask and is_causal say together; takes the call's mask.
Handle merged_mask(Call& call) {
  if (!call.causal) return std::move(call.mask.handle);
  Handle triangle = causal_mask(call);
  if (!call.has_mask) return triangle;
  if (call.mask.dtype != codes.boolean) {
    return where(std::move(triangle), std::move(call.mask.handle), minus_infinity(call));
  }
  uint64_t both[] = {word(std::move(triangle)), word(std::move(call.mask.handle))};
  return call_op("aten::logical_and", "", both);
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
      bias = where(std::move(bias), zero(call), minus_infinity(call));
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
  if (call.causal) scores = where(causal_mask(call), std::move(scores), minus_infinity(call));
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
  Handle mask = merge ? merged_mask(call) : std::move(call.mask.handle);
  Handle sees = rows_to_keep(call, mask);
  uint64_t stack[] = {word(std::move(call.q.handle)),
                      word(std::move(call.k.handle)),
                      word(std::move(call.v.handle)),
                      mask ? optional_word(std::move(mask)) : kNone,
                      word(0.0),
                      word(call.causal && !merge),
                      call.has_scale ? optional_word(call.scale) : kNone,
                      word(call.gqa)};
  Handle out = call_op("aten::scaled_dot_product_attention", "", stack);
  return sees ? where(std::move(sees), std::move(out), zero(call)) : std::move(out);
}

constexpr Vendor kVendors[] = {
    {"torch.sdpa", no_refusal, run_sdpa},
    {"torch.flash", flash_refusal, run_flash},
    {"torch.efficient", efficient_refusal, run_efficient},
    {"torch.cudnn", cudnn_refusal, run_cudnn},
    {"torch.unfused", upper_left, run_unfused},
    {"flash_attn2.fwd", lower_right_refusal, nullptr, "autofa_vendors::flash_attn2_fwd"},
    {"flash_attn3.fwd", lower_right_refusal, nullptr, "autofa_vendors::flash_attn3_fwd"},
    {"fa3_fwd.fwd", lower_right_refusal, nullptr, "autofa_vendors::fa3_fwd_fwd"},
    {"flash_attn4.fwd", no_empty_rows_refusal, nullptr, "autofa_vendors::flash_attn4_fwd"},
    {"ffpa.triton", no_empty_rows_refusal, nullptr, "autofa_vendors::ffpa_triton", true},
    {"ffpa.cute", square_causal_refusal, nullptr, "autofa_vendors::ffpa_cute"},
};

}  // namespace

Handle run_vendor(const Vendor& vendor, Call& call, Handle* lse) {
  // torch's dispatcher switches the device for kernels in C++, not for operators in Python, whose
  // libraries ask for the current device's stream and properties.
  const DeviceGuard guard(call);
  mend(call);  // first: a product of overlapping rows is laid out in any order
  make_scale_positive(call);
  if (vendor.op == nullptr) return call.with_output_strides(vendor.launch(call));
  Handle out = run_operator(vendor, call, lse);
  return out ? call.with_output_strides(std::move(out)) : std::move(out);
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
