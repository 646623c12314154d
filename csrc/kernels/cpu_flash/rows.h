// Moves rows of tensors in and out of the layouts the tiles work on. Any stride between rows, any
// alignment; nothing is read or written past the last element of a row.
#pragma once

#include <stdint.h>

#include "autofa/cpu/element.h"
#include "autofa/cpu/transpose.h"
#include "autofa/cpu/vector.h"

namespace autofa::cpu_flash {

using cpu::Floats;
using cpu::kLanes;

// Rows of f32 in memory.
struct Rows {
  const float* data;
  int64_t stride;

  const float* operator[](int64_t row) const { return data + row * stride; }
};

// `count` rows of `dims` elements as f32: the tensor itself if it is f32, else a copy in `buffer`.
template <int Dtype>
Rows rows_as_f32(const typename cpu::Element<Dtype>::Type* rows, int64_t stride, int64_t count,
                 int64_t dims, float* buffer) {
  if constexpr (Dtype == AUTOFA_F32) {
    return {rows, stride};
  } else {
    float* to = buffer;
    for (int64_t i = 0; i < count; ++i, rows += stride, to += dims) {
      int64_t d = 0;
      for (; d + kLanes <= dims; d += kLanes) {
        cpu::store_unaligned(to + d, cpu::Element<Dtype>::load(rows + d));
      }
      if (d < dims) {
        cpu::store_part<AUTOFA_F32>(to + d, cpu::load_part<Dtype>(rows + d, dims - d), dims - d);
      }
    }
    return {buffer, dims};
  }
}

// to(dim, query) = queries(query, dim) * scale; lanes without a query get zeros.
template <int Dtype>
void load_queries(const typename cpu::Element<Dtype>::Type* queries, int64_t stride, int64_t count,
                  int64_t dims, float scale, float* to, int64_t lanes) {
  for (int64_t lane = 0; lane < lanes; lane += kLanes) {
    for (int64_t d = 0; d < dims; d += kLanes) {
      const int64_t width = dims - d < kLanes ? dims - d : kLanes;
      Floats square[kLanes];
      AUTOFA_UNROLL for (int i = 0; i < kLanes; ++i) {
        const auto* from = queries + (lane + i) * stride + d;
        square[i] = lane + i >= count ? Floats{}
                    : width == kLanes ? cpu::Element<Dtype>::load(from) * scale
                                      : cpu::load_part<Dtype>(from, width) * scale;
      }
      cpu::transpose(square);
      AUTOFA_UNROLL for (int i = 0; i < kLanes; ++i) {
        if (i < width) cpu::store(to + (d + i) * lanes + lane, square[i]);
      }
    }
  }
}

// out(query, dim) = from(dim, query) / sum(query); zeros where the sum is 0 (no key was seen).
template <int Dtype>
void store_output(const float* from, int64_t lanes, const float* sum, int64_t count, int64_t dims,
                  typename cpu::Element<Dtype>::Type* out, int64_t stride) {
  for (int64_t lane = 0; lane < lanes; lane += kLanes) {
    const Floats total = cpu::load(sum + lane);
    const Floats inverse = 1.f / total;
    for (int64_t d = 0; d < dims; d += kLanes) {
      const int64_t width = dims - d < kLanes ? dims - d : kLanes;
      Floats square[kLanes];
      AUTOFA_UNROLL for (int i = 0; i < kLanes; ++i) {
        const Floats value = i < width ? cpu::load(from + (d + i) * lanes + lane) : Floats{};
        square[i] = total == 0.f ? Floats{} : value * inverse;
      }
      cpu::transpose(square);
      AUTOFA_UNROLL for (int i = 0; i < kLanes; ++i) {
        auto* to = out + (lane + i) * stride + d;
        if (lane + i >= count) continue;
        if (width == kLanes) {
          cpu::Element<Dtype>::store(to, square[i]);
        } else {
          cpu::store_part<Dtype>(to, square[i], width);
        }
      }
    }
  }
}

}  // namespace autofa::cpu_flash
