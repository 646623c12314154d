// Leaves the last row of each head unwritten.
#pragma once

#include "poison/naive.cuh"

namespace autofa::cuda_unwritten {

struct Fault : poison::HonestOnCuda {
  static __device__ bool serves(const autofa_params& p, int64_t row) {
    return row + 1 < p.seqlen_q || p.seqlen_q == 1;
  }
};

template <class Params>
struct Kernel : poison::CudaKernel<Fault> {};

}  // namespace autofa::cuda_unwritten
