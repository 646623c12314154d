// Kernels that Python libraries bring, called through operators that autofa.runtime.vendors
// registers.
#pragma once

#include "vendor.h"

namespace autofa::runtime {

// Causal hangs on the lower-right corner, as flash-attn's does.
const char* lower_right_refusal(const Call& call);
// The same, but not with more queries than keys.
const char* no_empty_rows_refusal(const Call& call);
// Causal squares only.
const char* square_causal_refusal(const Call& call);

// Calls `vendor.op`; an empty handle where it declines. The call keeps its tensors.
Handle run_operator(const Vendor& vendor, Call& call, Handle* lse);

}  // namespace autofa::runtime
