// Stands in for the header of the same name: registers are not counted.
#pragma once

#include "emulator.h"

namespace autofa {

constexpr int kWarpgroupThreads = 128;

inline int warpgroup_index() { return static_cast<int>(threadIdx.x) / kWarpgroupThreads; }

inline emulator::Barrier& warpgroup_barrier() {
  return emulator::block->warpgroups[threadIdx.x / kWarpgroupThreads];
}

template <int Count>
inline void release_registers() {
  static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256);
  emulator::wait(warpgroup_barrier(), kWarpgroupThreads);
}

template <int Count>
inline void take_registers() {
  static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256);
  emulator::wait(warpgroup_barrier(), kWarpgroupThreads);
}

inline emulator::Barrier& named_barrier(int number, int threads) {
  if (number < 1 || number > 15) emulator::fail("named barriers are 1 to 15");
  if (threads % 32 != 0 || threads <= 0) emulator::fail("a barrier is of whole warps");
  return emulator::block->named[number];
}

inline void named_barrier_sync(int number, int threads) {
  emulator::wait(named_barrier(number, threads), threads);
}

inline void named_barrier_arrive(int number, int threads) {
  emulator::Barrier& barrier = named_barrier(number, threads);
  ++emulator::progress;
  if (++barrier.arrived < threads) return;
  barrier.arrived = 0;
  ++barrier.generation;
}

}  // namespace autofa
