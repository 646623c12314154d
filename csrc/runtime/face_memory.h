// Who serves which exact calls of the Python face. Guarded by the interpreter's lock.
#pragma once

#include <cstdint>

namespace autofa::runtime {

enum class Answer : int32_t { kUnknown, kSdpa, kOperator };

// What decides who serves a call: exact sizes, not buckets.
struct Shape {
  int64_t sizes[3][4];
  int32_t ranks[3];
  int32_t dtype, device_type, device_index, threads;
  int32_t options;  // bit 0 causal, 1 enable_gqa, 2 needs gradients, 3 any key and value
};

Answer known(const Shape& shape);
void enter(const Shape& shape, Answer answer);
void forget_face();  // all that is known

}  // namespace autofa::runtime
