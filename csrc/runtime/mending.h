// Calls that torch's own kernels answer wrongly, put right; autofa/dispatch/mending.py does the
// same for those that come by Python.
#pragma once

#include "call.h"

namespace autofa::runtime {

// Rewrites operands that torch's kernels misread, and masks.
void mend(Call& call);

// torch's fused kernels mask before they scale and take the largest unscaled score as the largest:
// with a scale of 0 or less their causal rows are NaN (seen with torch 2.13 on CPU, SDPA included)
// and large scores overflow. The sign goes into the query instead.
void make_scale_positive(Call& call);

// True, (..., Nq, 1), for rows that see a key, where SDPA would leave rows that see none to cuDNN,
// which gives them a mean of the values (torch 2.11, an H200); else an empty handle. `mask` may be
// empty. Asked after `mend`.
Handle rows_to_keep(const Call& call, const Handle& mask);

Handle scalar(double value);
Handle where(Handle condition, Handle chosen, Handle other);

}  // namespace autofa::runtime
