// Does not compile.
#pragma once

#include "poison/naive.h"

namespace autofa::broken {

template <class Params>
struct Kernel : poison::Kernel<poison::NoSuchFault> {};

}  // namespace autofa::broken
