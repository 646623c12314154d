// The tunable constants of cpu.flash, checked once.
#pragma once

#include "autofa/abi.h"
#include "autofa/cpu/element.h"
#include "autofa/cpu/vector.h"

namespace autofa::cpu_flash {

// `Params` names: dtype and isa (as in abi.h); tile_queries, the vectors of queries of a panel;
// tile_keys, the rows of the register tile of a full panel; block_k, keys between two rescalings.
template <class Params>
struct Config {
  static constexpr int dtype = Params::dtype;
  static constexpr int isa = Params::isa;
  static constexpr int max_vectors = Params::tile_queries;
  static constexpr int max_lanes = max_vectors * cpu::kLanes;
  static constexpr int block_k = Params::block_k;
  // Head dims summed before they are added to a score. Without a limit the error at head dim 512
  // was 1.9x that of torch's SDPA, with this one 0.5-0.8x, in the same time.
  static constexpr int64_t chunk_d = 128;
  using Type = typename cpu::Element<dtype>::Type;

  // Narrow panels get taller tiles, so that there are always enough independent sums to hide the
  // latency of the multiply-adds.
  static constexpr int tile_rows(int vectors) {
    const int rows = Params::tile_keys * Params::tile_queries / vectors;
    return rows > 12 && vectors < max_vectors ? 12 : rows;
  }

  static_assert(isa == (cpu::kLanes == 16 ? AUTOFA_V4 : AUTOFA_V3),
                "isa must be the instruction set that the library is compiled for");
  static_assert(dtype == AUTOFA_F32 || dtype == AUTOFA_F16 || dtype == AUTOFA_BF16);
  static_assert(Params::tile_keys >= 1 && max_vectors >= 1 && block_k >= 1);
  static_assert(Params::tile_keys * max_vectors + max_vectors < (isa == AUTOFA_V4 ? 32 : 16),
                "the register tile and one row of queries must fit in the register file");
};

}  // namespace autofa::cpu_flash
