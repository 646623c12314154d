// What the rows of a warp do not see of its keys.
#pragma once

#include <cstdint>

#include "autofa/abi.h"
#include "autofa/arch/element.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/block/explicit_mask.cuh"
#include "autofa/block/nonfinite.cuh"
#include "autofa/block/softmax.cuh"
#include "work.cuh"

namespace autofa::decode {

// How many keys, counted from a tile's first, each of the thread's rows sees.
template <class C>
struct Visible {
  int keys[C::m_tiles][2];

  __device__ __forceinline__ Visible(const BlockPlace<C>& place, int first_key) {
    for_each_row<C::m_tiles>([&](int m, int half) {
      const int limit = place.limit_of(place.row() + m * 16 + half * 8);
      keys[m][half] = min(limit, place.end_key) - first_key;
    });
  }

  __device__ __forceinline__ void hide(float (&scores)[C::m_tiles][C::n_tiles][4]) const {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
    for_each_row<C::m_tiles>([&](int m, int half) {
#pragma unroll
      for (int n = 0; n < C::n_tiles; ++n) {
        if (n * 8 + column >= keys[m][half]) scores[m][n][2 * half] = -kInfinity;
        if (n * 8 + column + 1 >= keys[m][half]) scores[m][n][2 * half + 1] = -kInfinity;
      }
    });
  }
};

// An explicit mask: each of the thread's rows lies in it by its own head and query. Neighbouring
// tiles find its elements in L1.
template <class C>
class MaskRows {
 public:
  __device__ __forceinline__ MaskRows(const SplitCall& arg, const BlockPlace<C>& place)
      : call_(arg.call), place_(place) {
    for_each_row<C::m_tiles>(
        [&](int m, int half) { offset_[m][half] = offset_of(place.row() + m * 16 + half * 8); });
  }

  __device__ __forceinline__ void apply(float (&scores)[C::m_tiles][C::n_tiles][4],
                                        int first_key) const {
    if constexpr (C::mask == AUTOFA_MASK_BOOL) {
      apply_as<BoolMaskElement>(scores, first_key);
    } else if (call_.mask_dtype == AUTOFA_F32) {
      apply_as<AdditiveMaskElement<FloatMaskValue>>(scores, first_key);
    } else if (call_.mask_dtype == AUTOFA_F16) {
      apply_as<AdditiveMaskElement<HalfMaskValue<F16>>>(scores, first_key);
    } else {
      apply_as<AdditiveMaskElement<HalfMaskValue<Bf16>>>(scores, first_key);
    }
  }

  __device__ __forceinline__ bool sees(int row, int key) const {
    if (key >= place_.end_key) return false;
    const int64_t offset = offset_of(row);
    if constexpr (C::mask == AUTOFA_MASK_BOOL) return *at<uint8_t>(offset, key) != 0;
    if (call_.mask_dtype == AUTOFA_F32) return *at<uint32_t>(offset, key) != 0xff800000u;
    const uint16_t infinity = call_.mask_dtype == AUTOFA_F16 ? F16::exponent : Bf16::exponent;
    return *at<uint16_t>(offset, key) != (infinity | 0x8000u);
  }

 private:
  // Rows beyond the last stand for the last.
  __device__ __forceinline__ int64_t offset_of(int row) const {
    const int own = min(row, place_.packing.rows - 1), group = place_.packing.group;
    return place_.batch * call_.mask_strides[0] +
           (place_.head_kv * group + own % group) * call_.mask_strides[1] +
           own / group * call_.mask_strides[2];
  }

  template <class Bits>
  __device__ __forceinline__ const Bits* at(int64_t offset, int key) const {
    return static_cast<const Bits*>(call_.attn_mask) + offset + key * call_.mask_strides[3];
  }

  template <class Kind>
  __device__ __forceinline__ void apply_as(float (&scores)[C::m_tiles][C::n_tiles][4],
                                           int first_key) const {
    constexpr float kLargest = 3.40282347e+38f;
    const float wanted = call_.scale * 1.4426950408889634f;
    const float scale = fmaxf(-kLargest, fminf(wanted, kLargest));
    const int64_t stride = call_.mask_strides[3];
    const int key = first_key + static_cast<int>(threadIdx.x) % 4 * 2;
    for_each_row<C::m_tiles>([&](int m, int half) {
      const auto* values = at<typename Kind::Bits>(offset_[m][half], key);
#pragma unroll
      for (int n = 0; n < C::n_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[m][n][2 * half + i];
          const bool exists = key + n * 8 + i < place_.end_key;
          score = exists ? Kind::apply(score, scale, *values) : -kInfinity;
          values += i == 0 ? stride : 7 * stride;
        }
      }
    });
  }

  const autofa_params& call_;
  const BlockPlace<C>& place_;
  int64_t offset_[C::m_tiles][2];  // in elements
};

// Where rows see different keys of a tile: adds its non-finite values to `out` for the rows that
// see them, then replaces them by zeros, since 0 * NaN is NaN. For the warp's own values only;
// sees(row, key) counts from the thread's first row and from the tile's first key.
template <class C, class Ring, class Sees>
__device__ __forceinline__ void isolate_nonfinite(float (&out)[C::m_tiles][C::o_tiles][4],
                                                  uint32_t values, Sees sees) {
  using Element = typename C::Element;
  uint32_t found = 0;
  Ring::for_each_chunk(values, [&](uint32_t address) {
    uint32_t words[4];
    load_shared_16(words, address);
#pragma unroll
    for (int i = 0; i < 4; ++i) found |= nonfinite_bits<Element>(words[i]);
  });
  if (!__any_sync(~0u, found != 0)) return;

#pragma unroll 1
  for (int key = 0; key < C::keys; ++key) {
    // A bit per row of those that see the key. In a loop: this is rare, but its registers count.
    uint32_t seen = 0;
#pragma unroll 1
    for (int i = 0; i < 2 * C::m_tiles; ++i) {
      if (sees(i * 8, key)) seen |= 1u << i;
    }
    const uint32_t own = values + C::KvTile::offset(key, 0) + static_cast<int>(threadIdx.x) % 4 * 4;
#pragma unroll
    for (int n = 0; n < C::o_tiles; ++n) {
      const uint32_t word = load_shared_4(own + n * 16);
      const uint32_t odd = nonfinite_bits<Element>(word);
      if (odd == 0) continue;
      for_each_row<C::m_tiles>([&](int m, int half) {
        if (!(seen >> (2 * m + half) & 1u)) return;
        if (odd & 0x8000u) out[m][n][2 * half] += Element::unpack(word & 0xffffu);
        if (odd >> 16) out[m][n][2 * half + 1] += Element::unpack(word >> 16);
      });
    }
  }
  __syncwarp();
  Ring::for_each_chunk(values, [&](uint32_t address) {
    uint32_t words[4];
    load_shared_16(words, address);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] &= ~((nonfinite_bits<Element>(words[i]) >> 15) * 0xffffu);
    store_shared_16(address, words);
  });
  __syncwarp();
}

}  // namespace autofa::decode
