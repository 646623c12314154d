// A cache in pairs: what it loses is asked again in Python.
#include "face_memory.h"

#include <cstddef>
#include <cstring>

namespace autofa::runtime {
namespace {

struct Slot {
  Shape shape;
  Answer answer;
  uint32_t epoch;
};

constexpr size_t kSlots = 4096;
Slot slots[kSlots];
uint32_t epoch = 1;

size_t place_of(const Shape& shape) {
  uint64_t words[sizeof(Shape) / 8];
  std::memcpy(words, &shape, sizeof(Shape));
  uint64_t mixed = 0;
  for (const uint64_t word : words) mixed = (mixed ^ word) * 0x9e3779b97f4a7c15ull;
  return (mixed >> 40) % kSlots & ~size_t{1};
}

bool holds(const Slot& slot, const Shape& shape) {
  return slot.epoch == epoch && std::memcmp(&slot.shape, &shape, sizeof(Shape)) == 0;
}

}  // namespace

Answer known(const Shape& shape) {
  const size_t place = place_of(shape);
  for (size_t i = place; i < place + 2; ++i) {
    if (holds(slots[i], shape)) return slots[i].answer;
  }
  return Answer::kUnknown;
}

void enter(const Shape& shape, Answer answer) {
  const size_t place = place_of(shape);
  for (size_t i = place; i < place + 2; ++i) {
    if (holds(slots[i], shape)) {
      slots[i].answer = answer;
      return;
    }
  }
  if (slots[place].epoch == epoch) slots[place + 1] = slots[place];
  slots[place] = {shape, answer, epoch};
}

void forget_face() { ++epoch; }

}  // namespace autofa::runtime
