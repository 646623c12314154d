// Never returns.
#pragma once

#include "poison/naive.h"

namespace autofa::hangs {

struct Fault : poison::Honest {
  static void before(const autofa_params&) {
    volatile int forever = 1;
    while (forever) {
    }
  }
};

template <class Params>
struct Kernel : poison::Kernel<Fault> {};

}  // namespace autofa::hangs
