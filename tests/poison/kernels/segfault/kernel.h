// Writes to an address that is nobody's.
#pragma once

#include "poison/naive.h"

namespace autofa::segfault {

struct Fault : poison::Honest {
  static void before(const autofa_params&) { *reinterpret_cast<volatile int*>(8) = 1; }
};

template <class Params>
struct Kernel : poison::Kernel<Fault> {};

}  // namespace autofa::segfault
