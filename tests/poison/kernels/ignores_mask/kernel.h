// Ignores the causal mask.
#pragma once

#include "poison/naive.h"

namespace autofa::ignores_mask {

struct Fault : poison::Honest {
  static bool sees_mask() { return false; }
};

template <class Params>
struct Kernel : poison::Kernel<Fault> {};

}  // namespace autofa::ignores_mask
