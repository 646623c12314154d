// Never returns.
#pragma once

#include "poison/naive.cuh"

namespace autofa::cuda_hangs {

struct Fault : poison::HonestOnCuda {
  static __device__ void before(const autofa_params& p) {
    while (*static_cast<const volatile int*>(p.q) != 42) {
    }
  }
};

template <class Params>
struct Kernel : poison::CudaKernel<Fault> {};

}  // namespace autofa::cuda_hangs
