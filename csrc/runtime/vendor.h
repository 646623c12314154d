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
  Handle (*run)(Call&);
};

// Null if unknown, or if this torch has not the function.
const Vendor* find_vendor(const std::string& slug);

// torch.sdpa, with is_causal and attn_mask merged where both are given. Takes the call's tensors.
Handle run_sdpa(Call& call);

// The tensor multiplied by NaN: the C ABI has no fill.
Handle times_nan(Handle tensor);

}  // namespace autofa::runtime
