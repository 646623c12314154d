// Stands in for the header of the same name, by the definition of ldmatrix in the PTX manual.
#pragma once

#include "autofa/arch/shared_memory.cuh"

namespace autofa {

inline uint16_t matrix_element(const uint32_t (&addresses)[32], int matrix, int row, int col) {
  uint16_t value;
  std::memcpy(&value, shared_pointer(addresses[matrix * 8 + row], 16) + col * 2, 2);
  return value;
}

inline void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t row_address) {
  uint32_t all[32];
  emulator::exchange(row_address, all);
  const int row = emulator::lane() / 4, col = emulator::lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    fragment[i] = matrix_element(all, i, row, col) |
                  static_cast<uint32_t>(matrix_element(all, i, row, col + 1)) << 16;
  }
  __syncwarp();  // all lanes have read before any goes on to write
}

inline void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t row_address) {
  uint32_t all[32];
  emulator::exchange(row_address, all);
  const int row = emulator::lane() / 4, col = emulator::lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    fragment[i] = matrix_element(all, i, col, row) |
                  static_cast<uint32_t>(matrix_element(all, i, col + 1, row)) << 16;
  }
  __syncwarp();
}

}  // namespace autofa
