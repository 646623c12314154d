// Registers autofa::fwd, run and run_with_lse with torch's dispatcher.
//
// The boxed kernels are written by hand: they own the handles on the stack, and hand them on to
// torch without a copy. There is no autograd registration: it was measured to cost a call 10 us.
#include <torch/csrc/stable/library.h>

#include "launch.h"

namespace autofa::runtime {
namespace {

constexpr const char* kArguments =
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, "
    "float? scale=None, bool enable_gqa=False, bool lower_right=False";

uint64_t boxed(Handle handle) { return reinterpret_cast<uint64_t>(handle.release()); }

void fwd(StableIValue* stack, uint64_t, uint64_t) {
  Call call(stack);
  stack[0] = boxed(forward(call));
}

void run_one(StableIValue* stack, uint64_t, uint64_t) {
  Call call(stack + 1);
  stack[0] = boxed(run(call, static_cast<int64_t>(stack[0])));
}

void run_lse(StableIValue* stack, uint64_t, uint64_t) {
  Call call(stack + 1);
  Handle lse;
  Handle out = run_with_lse(call, static_cast<int64_t>(stack[0]), lse);
  stack[0] = boxed(std::move(out));
  stack[1] = boxed(std::move(lse));
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("fwd", fwd);
  m.impl("run", run_one);
  m.impl("run_with_lse", run_lse);
}

}  // namespace
}  // namespace autofa::runtime

STABLE_TORCH_LIBRARY(autofa, m) {
  const std::string arguments = autofa::runtime::kArguments;
  m.def(("fwd(" + arguments + ") -> Tensor").c_str());
  m.def(("run(int kernel, " + arguments + ") -> Tensor").c_str());
  m.def(("run_with_lse(int kernel, " + arguments + ") -> (Tensor, Tensor)").c_str());
}

STABLE_TORCH_LIBRARY_IMPL(autofa, CPU, m) { autofa::runtime::implement(m); }
STABLE_TORCH_LIBRARY_IMPL(autofa, CUDA, m) { autofa::runtime::implement(m); }
