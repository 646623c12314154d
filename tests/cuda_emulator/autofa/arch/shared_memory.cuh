// Stands in for the header of the same name: shared addresses are offsets into emulated memory.
#pragma once

#include "emulator.h"

namespace autofa {

inline uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - emulator::shared_base;
  return static_cast<uint32_t>(offset) | emulator::block->rank << 24;
}

// What lies at an address in any block of the cluster.
inline unsigned char* cluster_pointer(uint32_t address, int bytes) {
  const uint32_t rank = address >> 24, offset = address & 0xffffff;
  if (rank >= emulator::cluster.size() || offset + bytes > emulator::shared_bytes) {
    emulator::fail("a shared-memory address outside the cluster");
  }
  if (offset % bytes != 0) emulator::fail("a misaligned shared-memory address");
  return emulator::cluster[rank].shared + offset;
}

inline unsigned char* shared_pointer(uint32_t address, int bytes) {
  if (address >> 24 != emulator::block->rank) emulator::fail("shared memory of another block");
  return cluster_pointer(address, bytes);
}

inline uint32_t load_shared_4(uint32_t address) {
  uint32_t word;
  std::memcpy(&word, shared_pointer(address, 4), 4);
  return word;
}
inline void load_shared_16(uint32_t (&words)[4], uint32_t address) {
  std::memcpy(words, shared_pointer(address, 16), 16);
}

// wgmma and TMA may not touch these bytes before the thread's fence_proxy_async().
inline void note_plain_store(uint32_t address) {
  const uint32_t chunk = (address & 0xffffff) / 16;
  uint16_t& owner = emulator::block->stored[chunk];
  if (owner == emulator::current + 1) return;
  owner = static_cast<uint16_t>(emulator::current + 1);
  emulator::self().stores.push_back(chunk);
}

inline void store_shared_4(uint32_t address, uint32_t word) {
  std::memcpy(shared_pointer(address, 4), &word, 4);
  note_plain_store(address);
}
inline void store_shared_16(uint32_t address, const uint32_t (&words)[4]) {
  std::memcpy(shared_pointer(address, 16), words, 16);
  note_plain_store(address);
}

}  // namespace autofa
