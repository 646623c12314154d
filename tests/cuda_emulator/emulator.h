// Runs a CUDA kernel of this project on the CPU: each thread of a block, or of a cluster of blocks,
// is a fiber, and a fiber that waits at a barrier or a warp-wide instruction lets the next one run.
// Included by what stands in for cuda_runtime_api.h and for the instructions of autofa/arch.
//
// Meant to find wrong indices, missing barriers and missing waits where there is no GPU: shared
// memory starts as NaNs, asynchronous copies land only when they are waited for, warps run far
// apart, and what the hardware leaves undefined ends the launch with a message.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#define __device__
#define __host__
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
inline dim3 threadIdx, blockIdx, gridDim;

namespace emulator {

struct Copy {
  uint32_t target;
  const void* source;
  bool valid;
};

// A product of wgmma that was issued: its operands, and where the thread's sums are.
struct Product {
  uint32_t left[2], right[2];  // descriptors
  const uint32_t* registers;   // of the left operand, or null where it is in shared memory
  uint32_t held[4];            // what was in them
  float* sums;
  int tiles;
  bool accumulate, right_along_k;
  float (*unpack)(uint16_t);
};

// Sums that products are under way to: their values, while their place holds NaNs.
struct Sums {
  float* place;
  std::vector<float> values;
};

struct Thread {
  ucontext_t context;
  bool done = false;
  std::vector<Copy> copies;              // since the last commit
  std::deque<std::vector<Copy>> groups;  // committed, not yet waited for
  unsigned exchanges = 0;
  std::vector<uint32_t> stores;  // plain ones, of which wgmma and TMA do not know yet
  std::vector<Product> products;
  std::deque<std::vector<Product>> product_groups;
  std::vector<Sums> sums;
  bool product_fence = false;
};

struct Barrier {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Warp {
  Barrier barrier;
  alignas(16) unsigned char slots[2][32][32];
};

// Copies land when the barrier is waited for and all of its arrivals are there.
struct Mbarrier {
  int arrivals = 0, pending = 0;
  int64_t bytes = 0;  // announced, and not yet there
  uint64_t phase = 0;
  bool fenced = false;
  std::vector<std::function<int()>> landing;  // each returns its bytes
};

constexpr size_t shared_bytes = 256 * 1024;

struct Block {
  unsigned rank, index;
  unsigned char* shared;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Barrier> warpgroups;
  Barrier barrier, named[16];
  int any = 0;
  std::unordered_map<uint32_t, Mbarrier> mbarriers;
  std::vector<uint16_t> stored;  // of each 16 bytes: the thread + 1 that stored, without a fence
};

inline unsigned char* shared_base;  // set by EMULATE_SHARED_MEMORY: the memory of rank 0
inline std::vector<Block> cluster;
inline Barrier cluster_barrier;
inline std::string failure;
inline ucontext_t scheduler;
inline Block* block;
inline unsigned current;
inline uint64_t progress;
inline std::function<void()> body;

inline Thread& self() { return block->threads[current]; }
inline int lane() { return threadIdx.x % 32; }
inline void yield() { swapcontext(&self().context, &scheduler); }

// Ends the launch.
[[noreturn]] inline void fail(const std::string& what) {
  failure = what + " (block " + std::to_string(block->index) + ", thread " +
            std::to_string(current) + ")";
  for (;;) yield();
}

// A barrier of `count` threads, of which the last one to come first does `work`.
template <class Work>
inline void together(Barrier& barrier, int count, Work work) {
  const uint64_t generation = barrier.generation;
  ++progress;
  if (++barrier.arrived == count) {
    work();
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) yield();
}

inline void wait(Barrier& barrier, int count) {
  together(barrier, count, [] {});
}

// Every lane gives a value; the result is all 32 of them.
template <class Value>
inline const Value* exchange(const Value& value, Value (&all)[32]) {
  static_assert(sizeof(Value) <= 32);
  Warp& warp = block->warps[threadIdx.x / 32];
  auto& slots = warp.slots[self().exchanges++ % 2];
  std::memcpy(slots[lane()], &value, sizeof(Value));
  wait(warp.barrier, 32);
  for (int i = 0; i < 32; ++i) std::memcpy(&all[i], slots[i], sizeof(Value));
  return all;
}

inline void enter() {
  body();
  self().done = true;
  ++progress;
  yield();
}

constexpr size_t stack_bytes = 256 * 1024;
inline std::vector<std::unique_ptr<char[]>> stacks;             // used again by the next block
inline std::vector<std::unique_ptr<unsigned char[]>> memories;  // of the ranks from 1 on

inline unsigned char* memory_of(unsigned rank) {
  if (rank == 0) return shared_base;
  while (memories.size() < rank) memories.emplace_back(new unsigned char[shared_bytes]);
  return memories[rank - 1].get();
}

inline void start_block(Block& started, unsigned rank, unsigned index, unsigned count) {
  started.rank = rank;
  started.index = index;
  started.shared = memory_of(rank);
  std::memset(started.shared, 0xff, shared_bytes);
  started.threads = std::vector<Thread>(count);
  started.warps = std::vector<Warp>(count / 32);
  started.warpgroups = std::vector<Barrier>((count + 127) / 128);
  started.stored.assign(shared_bytes / 16, 0);
  for (unsigned i = 0; i < count; ++i) {
    if (stacks.size() <= rank * count + i) stacks.emplace_back(new char[stack_bytes]);
    Thread& thread = started.threads[i];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks[rank * count + i].get();
    thread.context.uc_stack.ss_size = stack_bytes;
    makecontext(&thread.context, enter, 0);
  }
}

// Runs one warp until only a barrier beyond it can stop it; how many threads ended.
inline unsigned run_warp(Block& running, unsigned warp) {
  unsigned ended = 0;
  block = &running;
  blockIdx.x = running.index;
  for (uint64_t before = ~uint64_t{0}; before != running.warps[warp].barrier.generation;) {
    before = running.warps[warp].barrier.generation;
    for (unsigned i = warp * 32; i < warp * 32 + 32; ++i) {
      if (running.threads[i].done) continue;
      current = i;
      threadIdx.x = i;
      swapcontext(&scheduler, &running.threads[i].context);
      if (!failure.empty()) return ended;
      ended += running.threads[i].done;
    }
  }
  return ended;
}

// Runs the blocks [first, first + ranks) as one cluster. False, and `failure`, if they went wrong.
inline bool run_cluster(unsigned first, unsigned ranks, unsigned count) {
  failure.clear();
  cluster = std::vector<Block>(ranks);
  cluster_barrier = {};
  for (unsigned rank = 0; rank < ranks; ++rank) {
    start_block(cluster[rank], rank, first + rank, count);
  }
  std::vector<unsigned> order(ranks * (count / 32));
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  // A warp runs for as long as it can: the others then are as late as can be.
  std::mt19937 random(first);
  for (unsigned left = ranks * count; left > 0;) {
    const uint64_t before = progress;
    std::shuffle(order.begin(), order.end(), random);
    for (unsigned warp : order) {
      left -= run_warp(cluster[warp / (count / 32)], warp % (count / 32));
      if (!failure.empty()) break;
    }
    if (failure.empty() && left > 0 && progress == before) {
      failure = "deadlock: every thread waits for another";
    }
    if (!failure.empty()) {
      std::fprintf(stderr, "emulator: %s\n", failure.c_str());
      return false;
    }
  }
  return true;
}

}  // namespace emulator

// Defines what a kernel of the namespace `where` declares as `extern __shared__ ... shared[]`.
#define EMULATE_SHARED_MEMORY(where)                                        \
  namespace where {                                                         \
  alignas(1024) unsigned char shared[emulator::shared_bytes];               \
  static const bool emulated = (emulator::shared_base = shared) != nullptr; \
  }

inline void __syncthreads() {
  emulator::wait(emulator::block->barrier, static_cast<int>(emulator::block->threads.size()));
}

inline int __syncthreads_or(int predicate) {
  int& any = emulator::block->any;
  any |= predicate != 0;
  __syncthreads();
  const int result = any;
  __syncthreads();
  any = 0;
  __syncthreads();
  return result;
}

inline void __syncwarp(unsigned = ~0u) {
  emulator::wait(emulator::block->warps[threadIdx.x / 32].barrier, 32);
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
  bool all[32];
  emulator::exchange(predicate, all);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i]) << i;
  return bits;
}

inline bool __any_sync(unsigned mask, bool predicate) {
  return __ballot_sync(mask, predicate) != 0;
}

template <class Value>
inline Value __shfl_sync(unsigned, Value value, int source) {
  Value all[32];
  return emulator::exchange(value, all)[source % 32];
}

template <class Value>
inline Value __shfl_xor_sync(unsigned, Value value, int mask) {
  Value all[32];
  return emulator::exchange(value, all)[emulator::lane() ^ mask];
}

inline unsigned atomicAdd(unsigned* target, unsigned addend) {
  const unsigned before = *target;
  *target += addend;
  return before;
}

[[noreturn]] inline void __trap() { emulator::fail("__trap"); }

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
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
