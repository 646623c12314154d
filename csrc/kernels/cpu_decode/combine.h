// Puts the partial results of a unit's splits together, in the order of the keys.
#pragma once

#include <math.h>
#include <stdint.h>

#include "autofa/abi.h"
#include "config.h"
#include "split.h"

namespace autofa::cpu_decode {

// Writes the output and log-sum-exp of `rows`; zeros and -inf for rows that saw no key.
template <class Config, class Plan>
void combine(const autofa_params& p, const RowRange& rows, const Plan& plan, float* partials) {
  using Type = typename Config::Type;
  const auto partial = [&](int64_t split) {
    return Partial::at(partials + split * plan.partial_floats(), plan.padded_rows, plan.out_stride);
  };
  const Partial first = partial(0);
  for (int64_t i = 0; i < rows.count; ++i) {
    float largest = first.largest[i];
    for (int64_t s = 1; s < plan.splits; ++s) {
      const float other = partial(s).largest[i];
      largest = other > largest ? other : largest;
    }
    float total = 0;
    float* const sum = first.out + i * plan.out_stride;
    for (int64_t s = 0; s < plan.splits; ++s) {
      const Partial part = partial(s);
      const Floats share = cpu::exp2_nonpositive(cpu::broadcast(part.largest[i] - largest));
      total += part.sum[i] * share[0];
      const float* from = part.out + i * plan.out_stride;
      for (int64_t d = 0; d < plan.out_stride; d += kLanes) {
        const Floats before = s ? cpu::load(sum + d) : Floats{};
        cpu::store(sum + d, before + cpu::load(from + d) * share);
      }
    }
    const int64_t head = rows.head(p, i), query = rows.query(p, i);
    Type* to = static_cast<Type*>(p.out) + rows.batch * p.out_strides[0] + head * p.out_strides[1] +
               query * p.out_strides[2];
    const float inverse = total == 0 ? 0 : 1 / total;
    for (int64_t d = 0; d < p.head_dim_v; d += kLanes) {
      const Floats value = cpu::load(sum + d) * inverse;
      if (p.head_dim_v - d < kLanes) {
        cpu::store_part<Config::dtype>(to + d, value, p.head_dim_v - d);
      } else {
        Config::Element::store(to + d, value);
      }
    }
    if (!p.lse) continue;
    const float ln2 = 0.693147180559945309417f;
    p.lse[(rows.batch * p.heads_q + head) * p.seqlen_q + query] =
        total == 0 ? -INFINITY : largest * ln2 + logf(total);
  }
}

}  // namespace autofa::cpu_decode
