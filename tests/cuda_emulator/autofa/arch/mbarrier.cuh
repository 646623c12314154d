// Stands in for the header of the same name: copies that count at a barrier land when it is waited
// for, or when the next phase's arrivals come.
#pragma once

#include "autofa/arch/shared_memory.cuh"

namespace autofa {

constexpr int kMbarrierBytes = 8;

inline emulator::Mbarrier& mbarrier_at(uint32_t barrier) {
  cluster_pointer(barrier, kMbarrierBytes);
  auto& known = emulator::cluster[barrier >> 24].mbarriers;
  const auto found = known.find(barrier & 0xffffff);
  if (found == known.end()) emulator::fail("an mbarrier that was not initialised");
  return found->second;
}

// One that copies and other blocks arrive at.
inline emulator::Mbarrier& fenced_mbarrier_at(uint32_t barrier) {
  auto& state = mbarrier_at(barrier);
  if (!state.fenced) emulator::fail("an mbarrier's initialisation without its fence");
  return state;
}

inline void mbarrier_settle(emulator::Mbarrier& state) {
  if (state.pending > 0) return;
  for (auto& land : state.landing) {
    state.bytes -= land();
    ++emulator::progress;
  }
  state.landing.clear();
  if (state.bytes < 0) emulator::fail("more bytes than an mbarrier was to expect");
  if (state.bytes > 0) return;
  state.pending = state.arrivals;
  ++state.phase;
  ++emulator::progress;
}

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  shared_pointer(barrier, kMbarrierBytes);
  emulator::Mbarrier fresh;
  fresh.arrivals = fresh.pending = arrivals;
  if (!emulator::block->mbarriers.emplace(barrier & 0xffffff, fresh).second) {
    emulator::fail("an mbarrier was initialised twice");
  }
}

inline void mbarrier_init_fence() {
  for (auto& each : emulator::block->mbarriers) each.second.fenced = true;
}

inline void mbarrier_count(emulator::Mbarrier& state, int bytes) {
  mbarrier_settle(state);
  if (state.pending == 0) emulator::fail("more arrivals than an mbarrier counts");
  state.bytes += bytes;
  --state.pending;
  ++emulator::progress;
  if (state.landing.empty()) mbarrier_settle(state);
}

inline void mbarrier_arrive(uint32_t barrier) {
  shared_pointer(barrier, kMbarrierBytes);
  mbarrier_count(mbarrier_at(barrier), 0);
}

inline void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  shared_pointer(barrier, kMbarrierBytes);
  if (bytes < 0 || bytes >= 1 << 20) emulator::fail("more bytes than an mbarrier can count");
  mbarrier_count(mbarrier_at(barrier), bytes);
}

inline void mbarrier_arrive_remote(uint32_t barrier) {
  mbarrier_count(fenced_mbarrier_at(barrier), 0);
}

inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  shared_pointer(barrier, kMbarrierBytes);
  auto& state = mbarrier_at(barrier);
  if (parity > 1) emulator::fail("a parity is 0 or 1");
  for (;;) {
    mbarrier_settle(state);
    if (state.phase % 2 != parity) return;
    emulator::yield();
  }
}

inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  mbarrier_wait(barrier, parity);
}

}  // namespace autofa
