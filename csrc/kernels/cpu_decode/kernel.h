// cpu.decode: attention of few queries against many keys on CPU, as in decoding. f32, and bf16 and
// f16 by conversion, always with f32 accumulation; dense, causal on either corner and explicit
// masks, grouped heads, any head dims and lengths.
//
// The keys of a head are split into tasks (flash-decoding), and all query heads that share a key
// head are rows of one task, so that keys and values are read from memory once. How keys are split
// depends on the shape alone and splits are combined in order: results repeat bit for bit on any
// number of threads.
#pragma once

#include <stdint.h>

#include <atomic>
#include <new>
#include <optional>

#include "autofa/abi.h"
#include "autofa/cpu/slices.h"
#include "combine.h"
#include "config.h"
#include "split.h"

namespace autofa::cpu_decode {

// How a problem is cut: units of rows that share keys, and splits of these keys.
template <class Config>
struct Plan {
  int64_t rows_per_head, ranges, unit_rows, padded_rows, units, splits, split_keys, out_stride;

  explicit Plan(const autofa_params& p) {
    rows_per_head = p.heads_q / p.heads_kv * p.seqlen_q;
    ranges = ceil_div(rows_per_head, Config::max_rows);
    unit_rows = ranges ? ceil_div(rows_per_head, ranges) : 0;
    padded_rows = end_of_tiles<Config::tile_rows>(unit_rows);
    units = p.batch * p.heads_kv * ranges;
    const int64_t keys = keys_seen(p, p.seqlen_q - 1);
    split_keys = Config::split_k;
    while (split_keys > Config::block_k / 2 &&
           units * ceil_div(keys, split_keys) < Config::enough_tasks) {
      split_keys /= 2;
    }
    splits = keys > split_keys ? ceil_div(keys, split_keys) : 1;
    out_stride = round_up(p.head_dim_v, kLanes);
  }

  int64_t partial_floats() const { return Partial::floats(padded_rows, out_stride); }
  int64_t counter_bytes() const { return round_up(units * sizeof(std::atomic<int32_t>), 64); }
  int64_t bytes() const {
    return counter_bytes() + units * splits * partial_floats() * int64_t{sizeof(float)};
  }
};

template <class Config>
class SplitWorker {
 public:
  SplitWorker(const autofa_params& params, const Plan<Config>& plan)
      : p_(params),
        plan_(plan),
        finished_(static_cast<std::atomic<int32_t>*>(params.workspace)),
        partials_(
            reinterpret_cast<float*>(static_cast<char*>(params.workspace) + plan.counter_bytes())) {
    for (int64_t i = 0; i < plan.units; ++i) new (finished_ + i) std::atomic<int32_t>(0);
  }

  std::optional<Memory> prepare() const {
    return Memory::allocate<Config>(plan_.padded_rows, p_.head_dim);
  }

  // One split; whoever finishes a unit's last one combines them all.
  void run(int64_t task, const Memory& memory) const {
    const int64_t unit = task / plan_.splits, split = task % plan_.splits;
    const int64_t head = unit / plan_.ranges, first = unit % plan_.ranges * plan_.unit_rows;
    const int64_t left = plan_.rows_per_head - first;
    const RowRange rows{head / p_.heads_kv, head % p_.heads_kv, first,
                        left < plan_.unit_rows ? left : plan_.unit_rows};
    const int64_t keys = keys_seen(p_, p_.seqlen_q - 1);
    const int64_t begin = split * plan_.split_keys, end = begin + plan_.split_keys;
    float* const of_unit = partials_ + unit * plan_.splits * plan_.partial_floats();
    const Partial to =
        Partial::at(of_unit + split * plan_.partial_floats(), plan_.padded_rows, plan_.out_stride);
    Split<Config>(p_, rows, memory, to, plan_.out_stride).run(begin, end < keys ? end : keys);
    const int32_t done = finished_[unit].fetch_add(1, std::memory_order_acq_rel) + 1;
    if (done == plan_.splits) combine<Config>(p_, rows, plan_, of_unit);
  }

 private:
  const autofa_params& p_;
  const Plan<Config>& plan_;
  std::atomic<int32_t>* const finished_;
  float* const partials_;
};

template <class Params>
struct Kernel {
  using Settings = Config<Params>;
  static constexpr int threads = 0;
  static constexpr int smem_bytes = 0;

  // Starting a second thread costs about 3.5 us, in which one thread reads this many bytes.
  static constexpr double threading_threshold = 1 << 16;

  static bool serves(const autofa_params& p) {
    return p.dtype == Settings::dtype && cpu::is_known_mask(p) && p.head_dim >= 1 &&
           p.head_dim_v >= 1 && p.heads_kv >= 1 && p.heads_q % p.heads_kv == 0;
  }

  static int32_t launch(const autofa_params& params, const autofa_executor& executor, void*) {
    if (!serves(params)) return AUTOFA_REFUSED;
    const Plan<Settings> plan(params);
    const SplitWorker<Settings> worker(params, plan);
    const int64_t tasks = plan.units * plan.splits;
    const double bytes = static_cast<double>(plan.units) * keys_seen(params, params.seqlen_q - 1) *
                         (params.head_dim + params.head_dim_v) * sizeof(typename Settings::Type);
    int64_t threads = bytes < threading_threshold ? 1 : executor.num_threads;
    if (tasks < threads) threads = tasks;
    return cpu::run_slices(worker, tasks, threads, executor) ? AUTOFA_OK : AUTOFA_NO_MEMORY;
  }

  static int64_t workspace_bytes(const autofa_params& params) {
    return serves(params) ? Plan<Settings>(params).bytes() : 0;
  }
};

}  // namespace autofa::cpu_decode
