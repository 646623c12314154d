// From a checked call to an output tensor.
#pragma once

#include "call.h"
#include "kernels.h"

namespace autofa::runtime {

// Looks the call up and runs what the table, or the miss callback, says. Whatever that kernel
// cannot serve after all goes to torch.sdpa.
Handle forward(Call& call);

// Runs this kernel. Throws std::runtime_error if it cannot serve the call.
Handle run(Call& call, int64_t id);

// As `run` for a variant, and writes the log-sum-exp into `lse`, a new f32 tensor of the output's
// shape without its last dim.
Handle run_with_lse(Call& call, int64_t id, Handle& lse);

void set_miss(autofa_miss_fn fn);
void set_flags(int32_t flags);
int32_t get_flags();
int64_t counter(int32_t which);

}  // namespace autofa::runtime
