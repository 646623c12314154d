// Asks for more threads than a block may have.
#pragma once

#include "poison/naive.cuh"

namespace autofa::cuda_refused {

struct Fault : poison::HonestOnCuda {
  static constexpr int block = 2048;
};

template <class Params>
struct Kernel : poison::CudaKernel<Fault> {};

}  // namespace autofa::cuda_refused
