// Naive, and right, on CUDA.
#pragma once

#include "poison/naive.cuh"

namespace autofa::cuda_honest {

template <class Params>
struct Kernel : poison::CudaKernel<poison::HonestOnCuda> {};

}  // namespace autofa::cuda_honest
