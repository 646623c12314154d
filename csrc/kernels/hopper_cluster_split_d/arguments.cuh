// What the kernel is launched with: the call, and the maps by which TMA reads its tensors.
#pragma once

#include "autofa/abi.h"
#include "autofa/arch/tma.cuh"

namespace autofa::hopper_cluster_split_d {

struct Arguments {
  TensorMap q, k, v;
  autofa_params call;
};

}  // namespace autofa::hopper_cluster_split_d
