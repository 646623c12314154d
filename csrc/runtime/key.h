// Buckets, and what the table needs of a key. The twin of autofa/problem.py.
#pragma once

#include <cstdint>
#include <cstring>

#include "api.h"

namespace autofa::runtime {

// The power of two nearest to n in log space, ties up; 0 stays 0.
inline int64_t nearest_power_of_two(int64_t n) {
  if (n <= 1) return n < 0 ? 0 : n;
  const int k = 63 - __builtin_clzll(static_cast<uint64_t>(n));
  const bool up = static_cast<unsigned __int128>(n) * n >= static_cast<unsigned __int128>(1)
                                                               << (2 * k + 1);
  return int64_t{1} << (k + up);
}

// A bucket as a key holds it. Sizes from 2^31 on share the last bucket that fits.
inline int32_t bucket(int64_t n) {
  const int64_t power = nearest_power_of_two(n);
  return power > (int64_t{1} << 30) ? 1 << 30 : static_cast<int32_t>(power);
}

inline bool same(const autofa_key& a, const autofa_key& b) {
  return std::memcmp(&a, &b, sizeof(autofa_key)) == 0;
}

// FNV-1a over the fields.
inline uint32_t hash(const autofa_key& key) {
  uint64_t h = 0xcbf29ce484222325ull;
  int32_t fields[sizeof(autofa_key) / sizeof(int32_t)];
  std::memcpy(fields, &key, sizeof(fields));
  for (const int32_t field : fields) h = (h ^ static_cast<uint32_t>(field)) * 0x100000001b3ull;
  return static_cast<uint32_t>(h ^ (h >> 32));
}

}  // namespace autofa::runtime
