// torch's own attention kernels, called with the adaptation that SDPA itself gives them.
#pragma once

#include <string>

#include "call.h"

namespace autofa::runtime {

struct Vendor {
  const char* slug;
  // Why this very call is not served; null if it is. Answers only what a bucket cannot: that a
  // causal square is exactly square, for example. Dtypes and head dims are the declaration's.
  const char* (*refusal)(const Call&);
  // The output in whatever strides the kernel gives. May take tensors out of the call.
  Handle (*launch)(Call&);
};

// Null if unknown.
const Vendor* find_vendor(const std::string& slug);

// The output in the strides that every kernel gives. May take tensors out of the call.
Handle run_vendor(const Vendor& vendor, Call& call);

// The tensor multiplied by NaN: the C ABI has no fill.
Handle times_nan(Handle tensor);

}  // namespace autofa::runtime
