// Stands in for the header of the same name, by the fragment layouts of mma.m16n8k16 in the PTX
// manual.
#pragma once

#include "autofa/arch/element.cuh"

namespace autofa {

// Calls add(i, left, right) for each product that goes into the lane's sum of element i.
template <class Element, class Add>
inline void for_each_product(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Add add) {
  struct Operands {
    uint32_t a[4], b[2];
  } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}}, all[32];
  emulator::exchange(mine, all);
  const auto half = [](uint32_t word, int k) {
    return Element::unpack(static_cast<uint16_t>(k % 2 ? word >> 16 : word & 0xffff));
  };
  const int group = emulator::lane() / 4, pair = emulator::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = group + i / 2 * 8, col = pair * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int part = k % 8 / 2;
      add(i, half(all[row % 8 * 4 + part].a[row / 8 + k / 8 * 2], k),
          half(all[col * 4 + part].b[k / 8], k));
    }
  }
}

template <class Element>
inline void mma_m16n8k16(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  for_each_product<Element>(a, b0, b1,
                            [&](int i, float left, float right) { sums[i] += left * right; });
}

// One rounding per instruction, as the hardware's sums are no less exact than that.
template <class Element>
inline void mma_m16n8k16(uint32_t (&sums)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(Element::dtype == AUTOFA_F16);
  float wide[4];
  for (int i = 0; i < 4; ++i) wide[i] = F16::unpack(sums[i / 2] >> i % 2 * 16 & 0xffff);
  for_each_product<F16>(a, b0, b1,
                        [&](int i, float left, float right) { wide[i] += left * right; });
  for (int i = 0; i < 2; ++i) sums[i] = F16::pack(wide[2 * i], wide[2 * i + 1]);
}

}  // namespace autofa
