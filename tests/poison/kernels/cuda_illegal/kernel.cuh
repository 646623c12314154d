// Writes to an address that is nobody's: every later call of the process fails.
#pragma once

#include "poison/naive.cuh"

namespace autofa::cuda_illegal {

struct Fault : poison::HonestOnCuda {
  static __device__ void before(const autofa_params&) { *reinterpret_cast<volatile int*>(8) = 1; }
};

template <class Params>
struct Kernel : poison::CudaKernel<Fault> {};

}  // namespace autofa::cuda_illegal
