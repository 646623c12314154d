// Other libraries' attention kernels: torch's own, with the adaptation that SDPA itself gives them,
// and those that Python libraries bring, through operators that autofa.runtime.vendors registers.
#pragma once

#include <string>

#include "call.h"

namespace autofa::runtime {

struct Vendor {
  const char* slug;
  // Why this very call is not served; null if it is. Answers only what a bucket cannot: that a
  // causal square is exactly square, for example. Dtypes and head dims are the declaration's.
  const char* (*refusal)(const Call&);
  // The output in whatever strides the kernel gives. May take tensors out of the call. Null where
  // an operator in Python answers.
  Handle (*launch)(Call&);
  // That operator; it exists once Python has loaded the kernel. It returns the log-sum-exp too.
  const char* op = nullptr;
  // Whether it takes (B, H, N, D); else (B, N, H, D).
  bool heads_first = false;
};

// Null if unknown.
const Vendor* find_vendor(const std::string& slug);

// The output in the strides that every kernel gives. torch's own kernels may take tensors out of
// the call; an operator in Python takes none, and gives an empty handle where it declines. Throws
// std::runtime_error.
//
// lse: receives the log-sum-exp; null unless the vendor has an operator.
Handle run_vendor(const Vendor& vendor, Call& call, Handle* lse = nullptr);

// The tensor multiplied by NaN: the C ABI has no fill.
Handle times_nan(Handle tensor);

}  // namespace autofa::runtime
