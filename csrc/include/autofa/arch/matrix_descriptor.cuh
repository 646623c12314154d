// Shared-memory matrix descriptors of wgmma (PTX ISA, "Matrix Descriptor Format"), for tiles as TMA
// writes them with a swizzle of 128 bytes.
//
// A tile is made of groups of 64 columns; a group's rows follow each other, 128 bytes each, and of
// a row the 16-byte chunk c lies at c ^ (row % 8). Groups begin on 1024-byte boundaries.
#pragma once

#include <cstdint>

namespace autofa {

// Along which dimension of an operand its elements follow each other: K, the one that is summed
// over, or the other.
enum class Major { k, mn };

// As two words, of which only the low one depends on where the matrix lies: a product's address
// then takes one register and one addition.
struct MatrixDescriptor {
  uint32_t low, high;

  // The matrix that begins `bytes` further on, a multiple of 16.
  __device__ __forceinline__ MatrixDescriptor operator+(int bytes) const {
    return {low + static_cast<uint32_t>(bytes / 16), high};
  }

  // The same, unknown to the compiler: from a loop's invariant it works out the addresses of all
  // the loop's products ahead, and spills them.
  __device__ __forceinline__ MatrixDescriptor opaque() const {
    uint32_t word = low;
    asm volatile("" : "+r"(word));
    return {word, high};
  }
};

constexpr int kSwizzledRowBytes = 128;                      // 64 columns of 16-bit elements
constexpr int kSwizzleRepeatBytes = 8 * kSwizzledRowBytes;  // what a group's start is aligned to
constexpr int kK16BytesAlongK = 32;                         // to the next 16 of K, within a group
constexpr int kK16BytesAcross = 16 * kSwizzledRowBytes;     // the same where rows are K

// The matrix at `address`. Along K, rows are of the other dimension, and one group is all that a
// product of 16 K reads; `group_bytes` is not used. Across, rows are of K, and the other dimension
// goes on in the next group, `group_bytes` away.
//
// The address of a thread block of a cluster has its rank in the bits from 24 on, which would land
// among the bits of the group distance.
template <Major Order>
__device__ __forceinline__ MatrixDescriptor matrix_descriptor(uint32_t address,
                                                              int group_bytes = 16) {
  constexpr uint32_t swizzle_128 = 1u << 30;
  const uint32_t leading = Order == Major::mn ? static_cast<uint32_t>(group_bytes) / 16 : 1;
  return {(address & 0x3ffffu) >> 4 | leading << 16, kSwizzleRepeatBytes / 16 | swizzle_128};
}

}  // namespace autofa
