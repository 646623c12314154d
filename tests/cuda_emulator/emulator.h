// Runs a CUDA kernel of this project on the CPU: each thread of a block is a fiber, and a fiber
// that waits at a barrier or a warp-wide instruction lets the next one run. Included by what stands
// in for cuda_runtime_api.h and for the instructions of autofa/arch.
//
// Meant to find wrong indices, missing barriers and missing waits where there is no GPU: shared
// memory starts as NaNs, cp.async writes only when it is waited for, and warps run far apart.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline dim3 threadIdx, blockIdx;

namespace emulator {

struct Copy {
  uint32_t target;
  const void* source;
  bool valid;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  std::vector<Copy> copies;              // since the last commit
  std::deque<std::vector<Copy>> groups;  // committed, not yet waited for
  unsigned exchanges = 0;
};

struct Barrier {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Warp {
  Barrier barrier;
  alignas(16) unsigned char slots[2][32][32];
};

constexpr size_t shared_bytes = 256 * 1024;
inline unsigned char* shared_base;  // set by EMULATE_SHARED_MEMORY
inline std::vector<Thread> threads;
inline std::vector<Warp> warps;
inline Barrier block_barrier;
inline int block_or[2];
inline ucontext_t scheduler;
inline unsigned current;
inline void (*body)(const void*);
inline const void* argument;

inline Thread& self() { return threads[current]; }
inline int lane() { return threadIdx.x % 32; }

inline void wait(Barrier& barrier, int count) {
  const uint64_t generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) swapcontext(&self().context, &scheduler);
}

// Every lane gives a value; the result is all 32 of them.
template <class Value>
inline const Value* exchange(const Value& value, Value (&all)[32]) {
  static_assert(sizeof(Value) <= 32);
  Warp& warp = warps[threadIdx.x / 32];
  auto& slots = warp.slots[self().exchanges++ % 2];
  std::memcpy(slots[lane()], &value, sizeof(Value));
  wait(warp.barrier, 32);
  for (int i = 0; i < 32; ++i) std::memcpy(&all[i], slots[i], sizeof(Value));
  return all;
}

inline void enter() {
  body(argument);
  self().done = true;
  swapcontext(&self().context, &scheduler);
}

inline void run_block(unsigned count, unsigned seed) {
  std::memset(shared_base, 0xff, shared_bytes);
  threads = std::vector<Thread>(count);
  warps = std::vector<Warp>(count / 32);
  block_barrier = {};
  block_or[0] = block_or[1] = 0;
  std::vector<unsigned> order(warps.size());
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  for (unsigned i = 0; i < count; ++i) {
    constexpr size_t stack_bytes = 256 * 1024;
    Thread& thread = threads[i];
    thread.stack = std::make_unique<char[]>(stack_bytes);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = stack_bytes;
    makecontext(&thread.context, enter, 0);
  }
  // A warp runs until only the block's barrier can stop it: the others then are as late as can be.
  std::mt19937 random(seed);
  for (unsigned left = count; left > 0;) {
    std::shuffle(order.begin(), order.end(), random);
    for (unsigned warp : order) {
      for (uint64_t before = ~uint64_t{0}; before != warps[warp].barrier.generation;) {
        before = warps[warp].barrier.generation;
        for (unsigned i = warp * 32; i < warp * 32 + 32; ++i) {
          if (threads[i].done) continue;
          current = i;
          threadIdx.x = i;
          swapcontext(&scheduler, &threads[i].context);
          left -= threads[i].done;
        }
      }
    }
  }
}

}  // namespace emulator

// Defines what a kernel of the namespace `where` declares as `extern __shared__ ... shared[]`.
#define EMULATE_SHARED_MEMORY(where)                                        \
  namespace where {                                                         \
  alignas(1024) unsigned char shared[emulator::shared_bytes];               \
  static const bool emulated = (emulator::shared_base = shared) != nullptr; \
  }

inline void __syncthreads() {
  emulator::wait(emulator::block_barrier, static_cast<int>(emulator::threads.size()));
}

inline int __syncthreads_or(int predicate) {
  int& any = emulator::block_or[0];
  any |= predicate != 0;
  __syncthreads();
  const int result = any;
  __syncthreads();
  any = 0;
  __syncthreads();
  return result;
}

inline void __syncwarp(unsigned = ~0u) {
  emulator::wait(emulator::warps[threadIdx.x / 32].barrier, 32);
}

inline bool __any_sync(unsigned, bool predicate) {
  bool all[32], any = false;
  emulator::exchange(predicate, all);
  for (bool each : all) any |= each;
  return any;
}

template <class Value>
inline Value __shfl_xor_sync(unsigned, Value value, int mask) {
  Value all[32];
  return emulator::exchange(value, all)[emulator::lane() ^ mask];
}

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __fdividef(float a, float b) { return a / b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
