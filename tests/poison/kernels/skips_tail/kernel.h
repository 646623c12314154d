// Skips the keys that fill no tile of 16.
#pragma once

#include "poison/naive.h"

namespace autofa::skips_tail {

struct Fault : poison::Honest {
  static int64_t last_key(int64_t visible, const autofa_params& p) {
    const int64_t whole = p.seqlen_k / 16 * 16;
    return whole > 0 && visible > whole ? whole : visible;
  }
};

template <class Params>
struct Kernel : poison::Kernel<Fault> {};

}  // namespace autofa::skips_tail
