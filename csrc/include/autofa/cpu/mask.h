// Explicit masks of any broadcast shape, as what is added to scores in units of log 2: -inf where a
// key is hidden.
#pragma once

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "autofa/abi.h"
#include "autofa/cpu/element.h"
#include "autofa/cpu/transpose.h"
#include "autofa/cpu/vector.h"

namespace autofa::cpu {

// A finite bias stays finite in units of log 2: the lowest float must not hide a key by itself.
inline Floats bias_of(Floats mask) {
  const Floats scaled = max(broadcast(-FLT_MAX), mask * 1.44269504088896340736f);
  return mask == -INFINITY ? mask : scaled;
}

// MaskElement<Dtype> is Element<Dtype> for additive masks; here, for boolean ones.
constexpr int kBool = -1;

template <int Dtype>
struct MaskElement {
  using Type = typename Element<Dtype>::Type;
  static Floats load(const Type* from) { return bias_of(Element<Dtype>::load(from)); }
};

template <>
struct MaskElement<kBool> {
  using Type = uint8_t;
  static Floats load(const Type* from) {
#ifdef __AVX512F__
    __m128i bytes;
    memcpy(&bytes, from, kLanes);
    const Ints visible = reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(bytes));
#else
    __m128i bytes = {};
    memcpy(&bytes, from, kLanes);
    const Ints visible = reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(bytes));
#endif
    return visible != 0 ? Floats{} : broadcast(-INFINITY);
  }
};

inline bool is_known_mask(const autofa_params& p) {
  return p.mask == AUTOFA_MASK_NONE || p.mask == AUTOFA_MASK_BOOL ||
         (p.mask == AUTOFA_MASK_ADDITIVE && p.mask_dtype >= AUTOFA_F32 &&
          p.mask_dtype <= AUTOFA_BF16);
}

inline bool any(Ints conditions) {
#ifdef __AVX512F__
  const __m512i bits = reinterpret_cast<__m512i>(conditions);
  return _mm512_test_epi32_mask(bits, bits) != 0;
#else
  return _mm256_movemask_ps(reinterpret_cast<__m256>(conditions)) != 0;
#endif
}

// The mask of one head. Rows are queries, columns are keys; nothing outside of it is read.
class HeadMask {
 public:
  HeadMask() = default;

  HeadMask(const autofa_params& p, int64_t batch, int64_t head)
      : kind_(p.mask == AUTOFA_MASK_BOOL ? kBool : p.mask_dtype),
        offset_(batch * p.mask_strides[0] + head * p.mask_strides[1]),
        row_stride_(p.mask_strides[2]),
        column_stride_(p.mask_strides[3]),
        data_(p.mask == AUTOFA_MASK_NONE ? nullptr : p.attn_mask) {}

  // Whether there is one. The rest must not be called else.
  explicit operator bool() const { return data_ != nullptr; }

  // Lane i = (row, column + i); zeros from lane `columns` on.
  Floats load_row(int64_t row, int64_t column, int64_t columns) const {
    return with_type([&](auto element) {
      return lanes<decltype(element)>(row, column, column_stride_, columns);
    });
  }

  // Lane i of square[j] = (row + i, column + j), for i < rows and j < columns.
  void load_square(int64_t row, int64_t rows, int64_t column, int64_t columns,
                   Floats (&square)[kLanes]) const {
    with_type([&](auto element) {
      using Mask = decltype(element);
      if (row_stride_ == 0) {
        const Floats all = lanes<Mask>(row, column, column_stride_, columns);
        for (int i = 0; i < kLanes; ++i) square[i] = broadcast(all[i]);
        return Floats{};
      }
      const bool by_rows = column_stride_ == 1;
      const int64_t count = by_rows ? rows : columns, width = by_rows ? columns : rows;
      for (int64_t i = 0; i < kLanes; ++i) {
        square[i] = i >= count ? Floats{}
                    : by_rows  ? lanes<Mask>(row + i, column, 1, width)
                               : lanes<Mask>(row, column + i, row_stride_, width);
      }
      if (by_rows) transpose(square);
      return Floats{};
    });
  }

  // Whether these columns are hidden from all of these rows. Stops at the first that is not.
  bool hides(int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    const int64_t last_row = row_stride_ ? row + rows : row + 1;
    const int64_t last = column_stride_ ? column + columns : column + 1;
    for (int64_t i = row; i < last_row; ++i) {
      for (int64_t j = column; j < last; j += kLanes) {
        const auto inside = lane_numbers() < static_cast<int32_t>(last - j);
        if (any(inside & (load_row(i, j, last - j) != -INFINITY))) return false;
      }
    }
    return true;
  }

 private:
  template <class F>
  Floats with_type(F&& f) const {
    switch (kind_) {
      case kBool:
        return f(MaskElement<kBool>());
      case AUTOFA_F16:
        return f(MaskElement<AUTOFA_F16>());
      case AUTOFA_BF16:
        return f(MaskElement<AUTOFA_BF16>());
      default:
        return f(MaskElement<AUTOFA_F32>());
    }
  }

  // `count` lanes from (row, column) on, `stride` elements apart. Rows are left after a few hundred
  // bytes, too early for the hardware to fetch ahead: doing it here made masks of 4096 x 4096 f32
  // 1.24x faster, small ones no slower.
  template <class Mask>
  Floats lanes(int64_t row, int64_t column, int64_t stride, int64_t count) const {
    using Type = typename Mask::Type;
    const Type* from =
        static_cast<const Type*>(data_) + offset_ + row * row_stride_ + column * column_stride_;
    if (stride == 1 && count >= kLanes) {
      __builtin_prefetch(from + 4 * kLanes);
      return Mask::load(from);
    }
    Type some[kLanes] = {};
    for (int64_t i = 0; i < kLanes && i < count; ++i) some[i] = from[i * stride];
    const auto kept = lane_numbers() < static_cast<int32_t>(count < kLanes ? count : kLanes);
    return kept ? Mask::load(some) : Floats{};
  }

  int32_t kind_ = AUTOFA_F32;
  int64_t offset_ = 0, row_stride_ = 0, column_stride_ = 0;
  const void* data_ = nullptr;
};

}  // namespace autofa::cpu
