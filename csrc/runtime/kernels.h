// Every kernel that calls can be sent to: loaded variant libraries and vendor kernels, by id.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "api.h"
#include "vendor.h"

namespace autofa::runtime {

struct Kernel {
  std::string slug;
  std::string path;                // empty for vendors
  const Vendor* vendor = nullptr;  // or the following four
  decltype(&autofa_launch) launch = nullptr;
  decltype(&autofa_workspace_bytes) workspace_bytes = nullptr;
  const autofa_metadata* metadata = nullptr;
  uint64_t alignment_mask = 0;                // address bits that must be zero
  mutable std::atomic<uint64_t> launched{0};  // a bit for each CUDA device it is loaded on
};

constexpr int64_t kSdpaId = 0;

// The kernel of an id; null if there is none. Lock-free; kernels live as long as the process.
const Kernel* kernel_of(int64_t id);

// Loads a library once per path. Throws std::runtime_error with the reason if it is not usable.
int64_t add_library(const std::string& path, const std::string& slug, int32_t alignment);

// -1 if the slug is unknown here.
int64_t add_vendor(const std::string& slug);

}  // namespace autofa::runtime
