// Takes memory until there is none.
#pragma once

#include <stdlib.h>
#include <string.h>

#include "poison/naive.h"

namespace autofa::hoards {

struct Fault : poison::Honest {
  static void before(const autofa_params&) {
    constexpr size_t bytes = size_t{16} << 20;
    for (;;) memset(malloc(bytes), 1, bytes);
  }
};

template <class Params>
struct Kernel : poison::Kernel<Fault> {};

}  // namespace autofa::hoards
