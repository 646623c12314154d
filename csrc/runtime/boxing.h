// Boxing for torch's dispatcher: each value becomes a 64-bit word that the callee takes over.
#pragma once

#include <torch/csrc/stable/version.h>

#include <cstdint>
#include <cstring>

#include "handle.h"

namespace autofa::runtime {

inline uint64_t word(bool value) { return value; }
inline uint64_t word(int64_t value) { return static_cast<uint64_t>(value); }
inline uint64_t word(Handle handle) { return reinterpret_cast<uint64_t>(handle.release()); }
inline uint64_t word(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
template <class T>
uint64_t optional_word(T value) {
  return reinterpret_cast<uint64_t>(new uint64_t(word(std::move(value))));
}
constexpr uint64_t kNone = 0;

// Calls an op with `stack` as its arguments, which has room for its `results`, all tensors; gives
// the first of them.
template <size_t N>
Handle call_op(const char* name, const char* overload, uint64_t (&stack)[N], size_t results = 1) {
  // The version whose schemas these stacks are written for, so that a later torch can adapt them.
  check(torch_call_dispatcher(name, overload, stack, TORCH_TARGET_VERSION), name);
  for (size_t i = 1; i < results; ++i) Handle(reinterpret_cast<AtenTensorHandle>(stack[i]));
  return Handle(reinterpret_cast<AtenTensorHandle>(stack[0]));
}

}  // namespace autofa::runtime
