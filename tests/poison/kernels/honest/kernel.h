// Naive, and right.
#pragma once

#include "poison/naive.h"

namespace autofa::honest {

template <class Params>
struct Kernel : poison::Kernel<poison::Honest> {};

}  // namespace autofa::honest
