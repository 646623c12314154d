// mma.sync.m16n8k16 (sm_80): a 16x8 tile of sums, from 16-bit operands held by one warp.
#pragma once

#include <cstdint>

#include "autofa/arch/element.cuh"

namespace autofa {

// sums += a (16x16) * b (16x8), in f32.
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (Element::dtype == AUTOFA_F16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The same in f16: each word has two neighbours of a row. Twice as fast where sums in f32 run at
// half rate, as on RTX and L20 class GPUs.
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(uint32_t (&sums)[2], const uint32_t (&a)[4],
                                             uint32_t b0, uint32_t b1) {
  static_assert(Element::dtype == AUTOFA_F16, "there are no bf16 sums");
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, "
      "{%0, %1};\n"
      : "+r"(sums[0]), "+r"(sums[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace autofa
