// Stands in for the header of the same name, by the layouts of the PTX manual. Products happen when
// they are waited for, and read their operands then; until then their sums hold NaNs.
#pragma once

#include "autofa/arch/element.cuh"
#include "autofa/arch/matrix_descriptor.cuh"
#include "autofa/arch/shared_memory.cuh"
#include "autofa/arch/warpgroup.cuh"

namespace autofa {

inline void wgmma_fence() { emulator::self().product_fence = true; }

template <int Tiles>
inline void wgmma_landed(float (&)[Tiles][4]) {}
inline void compute_here(float&) {}

namespace products {

constexpr uint32_t kUnderWay = 0x7fc0dead;  // a NaN that no computation gives

using emulator::fail;
using emulator::Product;
using emulator::Sums;
using emulator::Thread;

inline Sums* find_sums(Thread& thread, const float* place) {
  for (Sums& each : thread.sums) {
    if (each.place == place) return &each;
  }
  return nullptr;
}

inline void issue(Product product, MatrixDescriptor right) {
  Thread& thread = emulator::self();
  if (!thread.product_fence) fail("a group of products without wgmma_fence");
  product.right[0] = right.low;
  product.right[1] = right.high;
  if (find_sums(thread, product.sums) == nullptr) {
    const int count = product.tiles * 4;
    thread.sums.push_back({product.sums, {product.sums, product.sums + count}});
    std::fill(product.sums, product.sums + count, __uint_as_float(kUnderWay));
  }
  thread.products.push_back(product);
}

// The 16-bit element at (row, k) of an operand in shared memory.
inline uint16_t element(const uint32_t (&descriptor)[2], bool along_k, int row, int k) {
  const auto field = [](uint32_t word) { return (word & 0x3fff) << 4; };
  const uint32_t start = field(descriptor[0]), leading = field(descriptor[0] >> 16);
  const uint32_t stride = field(descriptor[1]);
  if (descriptor[1] >> 30 != 1) fail("only matrices with a swizzle of 128 bytes are emulated");
  if ((descriptor[1] & 0x3fffc000) != 0) fail("a base offset or reserved bits in a descriptor");
  if (descriptor[0] & 0xc000c000) fail("bits between the fields of a descriptor");
  const uint32_t plain =
      along_k ? start + row / 8 * stride + row % 8 * 128 + k * 2
              : start + row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * 128;
  const uint32_t address = plain ^ (plain >> 7 & 7) << 4;
  if (address + 2 > emulator::shared_bytes) fail("a matrix outside shared memory");
  if (emulator::block->stored[address / 16] != 0) {
    fail("wgmma reads a plain store without fence_proxy_async");
  }
  uint16_t bits;
  std::memcpy(&bits, emulator::block->shared + address, 2);
  return bits;
}

// Does product `index` of the oldest group of the warpgroup's threads.
inline void perform(Thread* threads, size_t index) {
  const Product& first = threads[0].product_groups.front()[index];
  const int columns = first.tiles * 8;
  std::vector<float> left(64 * 16), right(columns * 16);
  for (int t = 0; t < kWarpgroupThreads; ++t) {
    if (threads[t].product_groups.front().size() <= index) fail("threads issue unequal products");
    const Product& own = threads[t].product_groups.front()[index];
    if (std::memcmp(own.left, first.left, 8) != 0 || std::memcmp(own.right, first.right, 8) != 0 ||
        own.tiles != first.tiles || own.accumulate != first.accumulate) {
      fail("threads issue unequal products");
    }
    if (own.registers == nullptr) continue;
    if (std::memcmp(own.registers, own.held, sizeof(own.held)) != 0) {
      fail("operand registers of a product under way were written");
    }
    for (int i = 0; i < 8; ++i) {
      const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, k = t % 4 * 2 + i % 2 + i / 4 * 8;
      const uint32_t word = own.held[i / 2];
      left[row * 16 + k] = own.unpack(static_cast<uint16_t>(i % 2 ? word >> 16 : word));
    }
  }
  for (int row = 0; first.registers == nullptr && row < 64; ++row) {
    for (int k = 0; k < 16; ++k) {
      left[row * 16 + k] = first.unpack(element(first.left, true, row, k));
    }
  }
  for (int column = 0; column < columns; ++column) {
    for (int k = 0; k < 16; ++k) {
      right[column * 16 + k] = first.unpack(element(first.right, first.right_along_k, column, k));
    }
  }
  for (int t = 0; t < kWarpgroupThreads; ++t) {
    Sums* sums = find_sums(threads[t], threads[t].product_groups.front()[index].sums);
    for (int i = 0; i < first.tiles * 4; ++i) {
      const float* a = &left[(t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) * 16];
      const float* b = &right[(i / 4 * 8 + t % 4 * 2 + i % 2) * 16];
      float sum = first.accumulate ? sums->values[i] : 0.0f;
      for (int k = 0; k < 16; ++k) sum += a[k] * b[k];
      sums->values[i] = sum;
    }
  }
}

// Hands the sums that no product is under way to any more back to their thread.
inline void land(Thread& thread) {
  const auto busy = [&](const Sums& sums) {
    const auto of_these = [&](const Product& product) { return product.sums == sums.place; };
    bool any = std::any_of(thread.products.begin(), thread.products.end(), of_these);
    for (const auto& group : thread.product_groups) {
      any |= std::any_of(group.begin(), group.end(), of_these);
    }
    return any;
  };
  for (size_t i = 0; i < thread.sums.size();) {
    Sums& sums = thread.sums[i];
    if (busy(sums)) {
      ++i;
      continue;
    }
    for (size_t j = 0; j < sums.values.size(); ++j) {
      if (__float_as_uint(sums.place[j]) != kUnderWay) {
        fail("sums of a product under way were written");
      }
      sums.place[j] = sums.values[j];
    }
    thread.sums.erase(thread.sums.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

inline void finish(size_t pending) {
  Thread* threads = &emulator::block->threads[threadIdx.x / kWarpgroupThreads * kWarpgroupThreads];
  while (threads[0].product_groups.size() > pending) {
    for (int t = 0; t < kWarpgroupThreads; ++t) {
      if (threads[t].product_groups.size() != threads[0].product_groups.size()) {
        fail("threads of a warpgroup have unequal groups");
      }
    }
    for (size_t i = 0; i < threads[0].product_groups.front().size(); ++i) perform(threads, i);
    for (int t = 0; t < kWarpgroupThreads; ++t) threads[t].product_groups.pop_front();
  }
  for (int t = 0; t < kWarpgroupThreads; ++t) land(threads[t]);
}

}  // namespace products

inline void wgmma_commit() {
  auto& thread = emulator::self();
  thread.product_groups.push_back(std::move(thread.products));
  thread.products.clear();
  thread.product_fence = false;
}

template <int Pending>
inline void wgmma_wait() {
  emulator::together(warpgroup_barrier(), kWarpgroupThreads,
                     [] { products::finish(static_cast<size_t>(Pending)); });
}

template <class Element, Major Right, int Tiles>
inline void wgmma_shared(float (&sums)[Tiles][4], MatrixDescriptor left, MatrixDescriptor right,
                         bool accumulate) {
  static_assert(Tiles % 2 == 0 && Tiles >= 2 && Tiles <= 32);
  products::issue({{left.low, left.high},
                   {},
                   nullptr,
                   {},
                   sums[0],
                   Tiles,
                   accumulate,
                   Right == Major::k,
                   Element::unpack},
                  right);
}

template <class Element, Major Right, int Tiles>
inline void wgmma_registers(float (&sums)[Tiles][4], const uint32_t (&left)[4],
                            MatrixDescriptor right, bool accumulate) {
  static_assert(Tiles % 2 == 0 && Tiles >= 2 && Tiles <= 32);
  products::issue({{},
                   {},
                   left,
                   {left[0], left[1], left[2], left[3]},
                   sums[0],
                   Tiles,
                   accumulate,
                   Right == Major::k,
                   Element::unpack},
                  right);
}

}  // namespace autofa
