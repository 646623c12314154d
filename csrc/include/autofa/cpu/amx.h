// AMX: products of 16-row tiles of bf16 on x86-64, and the permission to use them.
//
// The instructions are written as assembly, so that no more than x86-64-v4 is asked of the compiler
// and nothing else of a library comes to depend on them.
#pragma once

#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "autofa/cpu/vector.h"

namespace autofa::cpu::amx {

// A tile: 16 rows of 64 bytes.
constexpr int kRows = 16;

namespace detail {

inline bool cpu_has_it() {
  constexpr unsigned os_saves_extended_state = 1u << 27, avx512_bf16 = 1u << 5;
  constexpr unsigned amx = 1u << 22 | 1u << 24;           // AMX-BF16, AMX-TILE
  constexpr unsigned vectors_and_tiles = 0xe6 | 3 << 17;  // of XCR0: what the kernel switches
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & os_saves_extended_state)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & amx) != amx) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & avx512_bf16)) return false;
  unsigned low, high;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & vectors_and_tiles) == vectors_and_tiles;
}

// Linux gives a process the memory for tile registers only when it asks.
inline bool kernel_permits() {
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

struct alignas(64) Configuration {
  uint8_t palette = 0;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(Configuration) == 64, "as LDTILECFG reads it");

}  // namespace detail

// Whether this process may use AMX and AVX512-BF16. Asks the kernel once.
inline bool available() {
  static const bool found = detail::cpu_has_it() && detail::kernel_permits();
  return found;
}

// While it lives, the calling thread has eight whole tiles, and denormals count as zero in vectors
// as they always do in tiles. Then the thread's settings are what they were before; tile contents
// are not kept, as across any call.
class Session {
 public:
  Session() : control_(_mm_getcsr()) {
    constexpr unsigned flush_results = 0x8000, flush_operands = 0x40;
    _mm_setcsr(control_ | flush_results | flush_operands);
    asm volatile("sttilecfg %0" : "=m"(before_) : : "memory");
    detail::Configuration whole;
    whole.palette = 1;
    for (int i = 0; i < 8; ++i) {
      whole.rows[i] = kRows;
      whole.row_bytes[i] = 64;
    }
    asm volatile("ldtilecfg %0" : : "m"(whole) : "memory");
  }

  ~Session() {
    if (before_.palette) {
      asm volatile("ldtilecfg %0" : : "m"(before_) : "memory");
    } else {
      asm volatile("tilerelease" : : : "memory");
    }
    _mm_setcsr(control_);
  }

  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

 private:
  detail::Configuration before_;
  unsigned control_;
};

template <int Tile>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}

// Rows lie `stride` bytes apart.
template <int Tile>
inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(Tile), "r"(from), "r"(stride) : "memory");
}

template <int Tile>
inline void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(Tile), "r"(to), "r"(stride) : "memory");
}

// Sum(m, n) += the sum over k of A(m, 2k) B(k, 2n) + A(m, 2k + 1) B(k, 2n + 1): f32 sums of bf16
// products, where row k of B holds the terms 2k and 2k + 1 of each column side by side.
template <int Sum, int A, int B>
inline void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(A), "i"(B));
}

}  // namespace autofa::cpu::amx
