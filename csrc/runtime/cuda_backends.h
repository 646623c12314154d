// The flash and cuDNN backends of SDPA through libtorch_cuda's C shims of their aten ops.
//
// Called through the boxed dispatcher, torch 2.11 failed on both (they return integers and
// undefined tensors beside the output); the shims take no such detour.
#pragma once

#include "handle.h"

namespace autofa::runtime {

// The output of aten::_scaled_dot_product_flash_attention. Throws std::runtime_error.
Handle cuda_flash(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, bool causal,
                  double scale);

// The output of aten::_scaled_dot_product_cudnn_attention. Throws std::runtime_error.
Handle cuda_cudnn(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, bool causal,
                  double scale);

}  // namespace autofa::runtime
