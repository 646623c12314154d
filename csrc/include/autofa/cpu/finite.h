// Whether rows hold only numbers: a weight of 0 does not hide a NaN or an infinity in a value.
#pragma once

#include <stdint.h>

#include "autofa/cpu/element.h"
#include "autofa/cpu/vector.h"

namespace autofa::cpu {

// Of `count` rows of `dims` elements, `stride` apart. Tests the bits: g++ 12 folds a vector times 0
// to 0, whether or not it may hold a NaN.
template <int Dtype>
bool all_finite(const typename Element<Dtype>::Type* rows, int64_t stride, int64_t count,
                int64_t dims) {
  const Ints exponent = Ints{} + 0x7f800000;
  Ints found = {};
  const auto look = [&](Floats values) {
    found |= (reinterpret_cast<Ints>(values) & exponent) == exponent;
  };
  for (int64_t i = 0; i < count; ++i, rows += stride) {
    int64_t d = 0;
    for (; d + kLanes <= dims; d += kLanes) look(Element<Dtype>::load(rows + d));
    if (d < dims) look(load_part<Dtype>(rows + d, dims - d));
  }
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= found[i];
  return any == 0;
}

}  // namespace autofa::cpu
