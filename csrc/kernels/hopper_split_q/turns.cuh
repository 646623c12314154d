// Turns of a thread block's consumers: each issues a tile's products after the one before it, so
// that one's softmax runs beside the other's products. All must take as many turns.
#pragma once

#include "autofa/arch/warpgroup.cuh"

namespace autofa::hopper_split_q {

// Each consumer waits at a barrier of its own, where the one before it only arrives; before them
// come __syncthreads's and one for each consumer. Without turns none of this does anything.
template <int Consumers, bool Taken>
class Turns {
 public:
  __device__ __forceinline__ explicit Turns(int index) : index_(index) {}

  // Once, before the first wait.
  __device__ __forceinline__ void begin() const {
    if (index_ == Consumers - 1) pass();
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (Taken) named_barrier_sync(first + index_, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void pass() const {
    const int next = index_ + 1 == Consumers ? 0 : index_ + 1;
    if constexpr (Taken) named_barrier_arrive(first + next, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void skip() const {
    wait();
    pass();
  }

 private:
  static constexpr int first = 1 + Consumers;

  const int index_;
};

}  // namespace autofa::hopper_split_q
