// ldmatrix (sm_75): four 8x8 matrices of 16-bit elements from shared memory into mma fragments.
#pragma once

#include <cstdint>

namespace autofa {

// Lane l gives the address of row l % 8 of matrix l / 8, and gets two elements of each matrix.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_address)
               : "memory");
}

// The same with each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_address)
               : "memory");
}

}  // namespace autofa
