// Transposes a square of floats held in kLanes registers.
#pragma once

#include <utility>

#include "autofa/cpu/vector.h"

namespace autofa::cpu {
namespace detail {

// Swaps the off-diagonal squares of side `Half` between two rows that lie `Half` apart. The indices
// must be constants of one expression: g++ otherwise assembles them at run time, 2.5x slower.
template <int Half, int... Lane>
inline void exchange(Floats& a, Floats& b, std::integer_sequence<int, Lane...>) {
  const Floats x = a, y = b;
  a = __builtin_shufflevector(x, y, ((Lane & Half) ? Lane - Half + kLanes : Lane)...);
  b = __builtin_shufflevector(x, y, ((Lane & Half) ? Lane + kLanes : Lane + Half)...);
}

template <int Half>
inline void exchange_all(Floats (&rows)[kLanes]) {
  if constexpr (Half < kLanes) {
    AUTOFA_UNROLL for (int i = 0; i < kLanes; ++i) {
      if (!(i & Half)) {
        exchange<Half>(rows[i], rows[i + Half], std::make_integer_sequence<int, kLanes>());
      }
    }
    exchange_all<Half * 2>(rows);
  }
}

}  // namespace detail

// rows[i][j] becomes rows[j][i].
inline void transpose(Floats (&rows)[kLanes]) { detail::exchange_all<1>(rows); }

}  // namespace autofa::cpu
