// Stands in for the header of the same name: a copy happens when it is waited for, not before.
#pragma once

#include "autofa/arch/shared_memory.cuh"

namespace autofa {

inline void cp_async_16(uint32_t target, const void* source, bool valid = true) {
  if (valid && reinterpret_cast<uintptr_t>(source) % 16 != 0) {
    emulator::fail("cp.async from a misaligned address");
  }
  emulator::self().copies.push_back({target, source, valid});
}

inline void cp_async_commit() {
  auto& thread = emulator::self();
  thread.groups.push_back(std::move(thread.copies));
  thread.copies.clear();
}

template <int Pending>
inline void cp_async_wait() {
  auto& groups = emulator::self().groups;
  for (; groups.size() > Pending; groups.pop_front()) {
    for (const auto& copy : groups.front()) {
      unsigned char* target = shared_pointer(copy.target, 16);
      if (copy.valid) {
        std::memcpy(target, copy.source, 16);
      } else {
        std::memset(target, 0, 16);
      }
    }
  }
}

}  // namespace autofa
