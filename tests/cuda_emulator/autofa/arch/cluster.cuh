// Stands in for the header of the same name. An asynchronous store spoils its target when it is
// issued, and lands when its barrier is waited for.
#pragma once

#include "autofa/arch/mbarrier.cuh"

namespace autofa {

inline uint32_t cluster_rank() { return emulator::block->rank; }

inline int cluster_threads() {
  return static_cast<int>(emulator::cluster.size() * emulator::block->threads.size());
}

inline uint64_t& cluster_generation() {
  static std::unordered_map<const emulator::Thread*, uint64_t> awaited;
  return awaited[&emulator::self()];
}

inline void cluster_arrive() {
  emulator::Barrier& barrier = emulator::cluster_barrier;
  cluster_generation() = barrier.generation;
  ++emulator::progress;
  if (++barrier.arrived < cluster_threads()) return;
  barrier.arrived = 0;
  ++barrier.generation;
}

inline void cluster_wait() {
  while (emulator::cluster_barrier.generation == cluster_generation()) emulator::yield();
}

inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

inline uint32_t map_to_rank(uint32_t address, uint32_t rank) {
  if (rank >= emulator::cluster.size()) emulator::fail("a rank outside the cluster");
  return (address & 0xffffff) | rank << 24;
}

template <int Words>
inline void store_async(uint32_t target, const uint32_t* words, uint32_t barrier) {
  if (target >> 24 != barrier >> 24) {
    emulator::fail("an asynchronous store counts at another block's mbarrier");
  }
  unsigned char* place = cluster_pointer(target, Words * 4);
  if (emulator::cluster[target >> 24].threads[0].done &&
      emulator::cluster[target >> 24].threads.back().done) {
    emulator::fail("an asynchronous store to a block that has ended");
  }
  std::memset(place, 0xff, Words * 4);
  std::vector<uint32_t> kept(words, words + Words);
  fenced_mbarrier_at(barrier).landing.push_back([=] {
    std::memcpy(place, kept.data(), Words * 4);
    return Words * 4;
  });
}

inline void store_async_16(uint32_t target, const uint32_t (&words)[4], uint32_t barrier) {
  store_async<4>(target, words, barrier);
}
inline void store_async_4(uint32_t target, uint32_t word, uint32_t barrier) {
  store_async<1>(target, &word, barrier);
}

}  // namespace autofa
