// Right for a while, then dies of SIGFPE: only timing calls it so often.
#pragma once

#include <signal.h>

#include <atomic>

#include "poison/naive.h"

namespace autofa::sigfpe {

struct Fault : poison::Honest {
  static void before(const autofa_params&) {
    static std::atomic<int> calls{0};
    if (++calls > 16) raise(SIGFPE);
  }
};

template <class Params>
struct Kernel : poison::Kernel<Fault> {};

}  // namespace autofa::sigfpe
