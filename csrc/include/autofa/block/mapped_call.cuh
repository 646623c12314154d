// What a kernel that reads by TMA is launched with: the call, and the maps of its tensors.
#pragma once

#include "autofa/abi.h"
#include "autofa/arch/tma.cuh"

namespace autofa {

struct MappedCall {
  TensorMap q, k, v;
  autofa_params call;
};

}  // namespace autofa
