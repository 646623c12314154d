// Stands in for the header of the same name: shared addresses are offsets into emulated memory.
#pragma once

#include "emulator.h"

namespace autofa {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - emulator::shared_base);
}

inline unsigned char* shared_pointer(uint32_t address, int bytes) {
  if (address % bytes != 0 || address + bytes > emulator::shared_bytes) abort();
  return emulator::shared_base + address;
}

inline uint32_t load_shared_4(uint32_t address) {
  uint32_t word;
  std::memcpy(&word, shared_pointer(address, 4), 4);
  return word;
}
inline void load_shared_16(uint32_t (&words)[4], uint32_t address) {
  std::memcpy(words, shared_pointer(address, 16), 16);
}
inline void store_shared_4(uint32_t address, uint32_t word) {
  std::memcpy(shared_pointer(address, 4), &word, 4);
}
inline void store_shared_16(uint32_t address, const uint32_t (&words)[4]) {
  std::memcpy(shared_pointer(address, 16), words, 16);
}

}  // namespace autofa
