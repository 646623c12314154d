#include "cuda_backends.h"

#include "symbols.h"

namespace autofa::runtime {
namespace {

using H = AtenTensorHandle;
// query, key, value, dropout_p, is_causal, return_debug_mask, scale, then nine results.
using Flash = AOTITorchError (*)(H, H, H, double, int32_t, int32_t, double*, H*, H*, H*, H*,
                                 int64_t*, int64_t*, H*, H*, H*);
// query, key, value, attn_bias, compute_log_sumexp, then as above from dropout_p on.
using Cudnn = AOTITorchError (*)(H, H, H, H*, int32_t, double, int32_t, int32_t, double*, H*, H*,
                                 H*, H*, int64_t*, int64_t*, H*, H*, H*);

// What both return beside the output; the log-sum-exp, cumulative lengths and random state.
struct Rest {
  Handle tensors[6];
  int64_t numbers[2];
};

template <class Function>
Function shim(const char* name) {
  auto found = reinterpret_cast<Function>(symbol_of("libtorch_cuda.so", name));
  require(found != nullptr, "this torch has no ", name);
  return found;
}

}  // namespace

Handle cuda_flash(H q, H k, H v, bool causal, double scale) {
  static const auto call = shim<Flash>("aoti_torch_cuda__scaled_dot_product_flash_attention");
  Handle out;
  Rest rest;
  Handle(&t)[6] = rest.tensors;
  check(call(q, k, v, 0.0, causal, 0, &scale, out.receive(), t[0].receive(), t[1].receive(),
             t[2].receive(), &rest.numbers[0], &rest.numbers[1], t[3].receive(), t[4].receive(),
             t[5].receive()),
        "the flash backend");
  return out;
}

Handle cuda_cudnn(H q, H k, H v, bool causal, double scale) {
  static const auto call = shim<Cudnn>("aoti_torch_cuda__scaled_dot_product_cudnn_attention");
  Handle out;
  Rest rest;
  Handle(&t)[6] = rest.tensors;
  check(call(q, k, v, nullptr, 0, 0.0, causal, 0, &scale, out.receive(), t[0].receive(),
             t[1].receive(), t[2].receive(), &rest.numbers[0], &rest.numbers[1], t[3].receive(),
             t[4].receive(), t[5].receive()),
        "the cuDNN backend");
  return out;
}

}  // namespace autofa::runtime
