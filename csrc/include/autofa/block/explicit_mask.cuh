// Masks that come as tensors: boolean ones, and such that are added to the scores.
#pragma once

#include <cstdint>

#include "autofa/abi.h"
#include "autofa/arch/element.cuh"
#include "autofa/block/softmax.cuh"

namespace autofa {

// The elements of masks. Each has `Bits` for one of them and `Pair` for two neighbours.
struct BoolMaskElement {
  using Bits = uint8_t;
  using Pair = uint16_t;
  static __device__ __forceinline__ float apply(float score, float, Bits visible) {
    return visible ? score : -kInfinity;
  }
};

// Of a value that is added: scores become powers of two, ready for a softmax of scale 1.
template <class Value>
struct AdditiveMaskElement {
  using Bits = typename Value::Bits;
  using Pair = typename Value::Pair;
  static __device__ __forceinline__ float apply(float score, float scale_log2, Bits bits) {
    constexpr float kLog2e = 1.4426950408889634f, kLowest = -3.40282347e+38f;
    const float shift = Value::unpack(bits);
    float sum = fmaf(score, scale_log2, shift * kLog2e);
    // Only -inf hides. The lowest finite number is used for it too, and must stay finite here.
    if (sum < kLowest) sum = kLowest;
    return shift == -kInfinity ? -kInfinity : sum;
  }
};

template <class Element>
struct HalfMaskValue : Element {
  using Bits = uint16_t;
  using Pair = uint32_t;
};

struct FloatMaskValue {
  using Bits = uint32_t;
  using Pair = uint64_t;
  static __device__ __forceinline__ float unpack(Bits bits) { return __uint_as_float(bits); }
};

// The mask of one head. Reads no element of a row or key beyond the sequences. What is the same for
// all threads stays where it is, in constant memory.
template <int Mask>
class ExplicitMask {
 public:
  __device__ __forceinline__ ExplicitMask(const autofa_params& call, int batch, int head)
      : call_(call), head_offset_(batch * call.mask_strides[0] + head * call.mask_strides[1]) {}

  // Masks the scores of one tile. `row` is the thread's first row, `first_key` the tile's.
  template <int MTiles, int NTiles>
  __device__ __forceinline__ void apply(float (&scores)[MTiles][NTiles][4], int row,
                                        int first_key) const {
    if constexpr (Mask == AUTOFA_MASK_BOOL) {
      apply_as<BoolMaskElement>(scores, row, first_key);
    } else if (call_.mask_dtype == AUTOFA_F32) {
      apply_as<AdditiveMaskElement<FloatMaskValue>>(scores, row, first_key);
    } else if (call_.mask_dtype == AUTOFA_F16) {
      apply_as<AdditiveMaskElement<HalfMaskValue<F16>>>(scores, row, first_key);
    } else {
      apply_as<AdditiveMaskElement<HalfMaskValue<Bf16>>>(scores, row, first_key);
    }
  }

  __device__ __forceinline__ bool sees(int row, int key) const {
    if (key >= static_cast<int>(call_.seqlen_k)) return false;
    if constexpr (Mask == AUTOFA_MASK_BOOL) return *at<uint8_t>(row, key) != 0;
    if (call_.mask_dtype == AUTOFA_F32) return *at<uint32_t>(row, key) != 0xff800000u;
    const uint16_t infinity = call_.mask_dtype == AUTOFA_F16 ? F16::exponent : Bf16::exponent;
    return *at<uint16_t>(row, key) != (infinity | 0x8000u);
  }

 private:
  // Rows of a tile beyond the last stand for the last: they are computed, but never stored.
  template <class Bits>
  __device__ __forceinline__ const Bits* at(int row, int key) const {
    const int own = min(row, static_cast<int>(call_.seqlen_q) - 1);
    return static_cast<const Bits*>(call_.attn_mask) + head_offset_ + own * call_.mask_strides[2] +
           key * call_.mask_strides[3];
  }

  // Whether each pair of keys of a row, the first of them even, can be read as one.
  template <class Bits>
  __device__ __forceinline__ bool in_pairs() const {
    return call_.mask_strides[3] == 1 && (call_.mask_strides[2] | head_offset_) % 2 == 0 &&
           reinterpret_cast<uintptr_t>(call_.attn_mask) % (2 * sizeof(Bits)) == 0;
  }

  template <class Kind, int MTiles, int NTiles>
  __device__ __forceinline__ void apply_as(float (&scores)[MTiles][NTiles][4], int row,
                                           int first_key) const {
    using Bits = typename Kind::Bits;
    using Pair = typename Kind::Pair;
    const float scale = scale_log2();
    const int keys = static_cast<int>(call_.seqlen_k);
    const int first_col = first_key + threadIdx.x % 4 * 2;
    if (in_pairs<Bits>() && first_key + NTiles * 8 <= keys) {
      for_each_row<MTiles>([&](int m, int half) {
        const Bits* values = at<Bits>(row + m * 16 + half * 8, first_col);
#pragma unroll
        for (int n = 0; n < NTiles; ++n) {
          const Pair pair = *reinterpret_cast<const Pair*>(values + n * 8);
          float& low = scores[m][n][2 * half];
          float& high = scores[m][n][2 * half + 1];
          low = Kind::apply(low, scale, static_cast<Bits>(pair));
          high = Kind::apply(high, scale, static_cast<Bits>(pair >> sizeof(Bits) * 8));
        }
      });
    } else {
      const int64_t stride = call_.mask_strides[3];
      for_each_row<MTiles>([&](int m, int half) {
        const Bits* values = at<Bits>(row + m * 16 + half * 8, first_col);
#pragma unroll
        for (int n = 0; n < NTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = scores[m][n][2 * half + i];
            const bool exists = first_col + n * 8 + i < keys;
            score = exists ? Kind::apply(score, scale, *values) : -kInfinity;
            values += i == 0 ? stride : 7 * stride;
          }
        }
      });
    }
  }

  __device__ __forceinline__ float scale_log2() const {
    constexpr float kLargest = 3.40282347e+38f;
    const float scale = call_.scale * 1.4426950408889634f;
    return scale > kLargest ? kLargest : scale < -kLargest ? -kLargest : scale;
  }

  const autofa_params& call_;
  int64_t head_offset_;  // in elements
};

}  // namespace autofa
