// cpu.amx: flash attention forward in bf16 on AMX, with f32 sums. Dense, causal on either corner,
// explicit masks, grouped heads, any head dims and lengths.
//
// Tasks are the packing of some keys of a head, and then panels of queries of a head; threads share
// a counter and what was packed. Results repeat bit for bit, on any number of threads.
#pragma once

#include <stdint.h>

#include <optional>

#include "autofa/abi.h"
#include "autofa/cpu/amx.h"
#include "autofa/cpu/workers.h"
#include "config.h"
#include "keys.h"
#include "panel.h"

namespace autofa::cpu_amx {

template <class Config>
class Attention {
  // What a thread holds while it works.
  struct State {
    explicit State(const PanelMemory<Config>& m) : memory(m) {}
    PanelMemory<Config> memory;
    cpu::amx::Session session;
  };

 public:
  Attention(const autofa_params& params, const PackedKeys& keys, int64_t threads)
      : params_(params), keys_(keys), units_(squares(params.seqlen_q)) {
    const int64_t heads = params.batch * params.heads_q;
    panels_ = (units_ + Config::units - 1) / Config::units;
    // Narrower panels rather than idle threads.
    if (heads > 0 && heads * panels_ < threads * 2) {
      panels_ = clamp((threads * 2 + heads - 1) / heads, panels_, units_);
    }
    panel_tasks_ = heads * panels_;
  }

  int64_t tasks() const { return panel_tasks_ == 0 ? 0 : keys_.tasks() + panel_tasks_; }

  std::optional<State> prepare() const {
    PanelMemory<Config> memory;
    if (!memory.allocate(params_.head_dim, params_.head_dim_v)) return std::nullopt;
    return std::optional<State>(std::in_place, memory);
  }

  void run(int64_t task, const State& state) const {
    if (task < keys_.tasks()) return keys_.pack(task);
    const PanelView view = locate(task - keys_.tasks());
    keys_.wait(view.kv_head);
    Panel<Config>(params_, view, keys_, state.memory).run();
  }

 private:
  PanelView locate(int64_t task) const {
    const autofa_params& p = params_;
    const int64_t head = task / panels_ % p.heads_q;
    const int64_t batch = task / panels_ / p.heads_q;
    // The last panels of a causal head are the longest; they go first. Widths differ by at most 1.
    int64_t panel = task % panels_;
    if (p.causal) panel = panels_ - 1 - panel;
    const int64_t narrow = units_ / panels_, wide = units_ % panels_;
    const int64_t first = (panel * narrow + smaller(panel, wide)) * kSide;

    PanelView view;
    view.q = static_cast<const uint16_t*>(p.q) + batch * p.q_strides[0] + head * p.q_strides[1] +
             first * p.q_strides[2];
    view.out = static_cast<uint16_t*>(p.out) + batch * p.out_strides[0] + head * p.out_strides[1] +
               first * p.out_strides[2];
    view.lse = p.lse ? p.lse + (batch * p.heads_q + head) * p.seqlen_q + first : nullptr;
    view.batch = batch;
    view.head = head;
    view.kv_head = batch * p.heads_kv + head / (p.heads_q / p.heads_kv);
    view.first = first;
    view.queries = smaller(p.seqlen_q - first, (narrow + (panel < wide)) * kSide);
    view.causal = p.causal != AUTOFA_CAUSAL_NONE;
    view.diagonal = p.causal == AUTOFA_CAUSAL_LOWER_RIGHT ? p.seqlen_k - p.seqlen_q : 0;
    return view;
  }

  const autofa_params& params_;
  const PackedKeys& keys_;
  const int64_t units_;
  int64_t panels_;
  int64_t panel_tasks_;
};

template <class Params>
struct Kernel {
  static constexpr int threads = 0;
  static constexpr int smem_bytes = 0;

  // Starting a second thread costs about 3.5 us; below this many multiply-adds it costs more than
  // it saves.
  static constexpr double threading_threshold = 2e6;

  static bool serves(const autofa_params& p) {
    const bool known_mask = p.mask == AUTOFA_MASK_NONE || p.mask == AUTOFA_MASK_BOOL ||
                            (p.mask == AUTOFA_MASK_ADDITIVE && p.mask_dtype >= AUTOFA_F32 &&
                             p.mask_dtype <= AUTOFA_BF16);
    return p.dtype == AUTOFA_BF16 && known_mask && p.head_dim >= 1 && p.head_dim_v >= 1 &&
           p.heads_kv >= 1 && p.heads_q % p.heads_kv == 0;
  }

  static int32_t launch(const autofa_params& params, const autofa_executor& executor, void*) {
    using Settings = Config<Params>;
    if (!serves(params) || !cpu::amx::available()) return AUTOFA_REFUSED;
    const PackedKeys keys(params);
    const double work = 0.5 * params.batch * params.heads_q * params.seqlen_q * params.seqlen_k *
                        (params.head_dim + params.head_dim_v);
    const int64_t threads = work < threading_threshold ? 1 : executor.num_threads;
    const Attention<Settings> attention(params, keys, threads);
    const int64_t tasks = attention.tasks();
    if (tasks == 0) return AUTOFA_OK;
    PanelMemory<Settings> memory;
    if (!params.workspace || !memory.allocate(params.head_dim, params.head_dim_v)) {
      return AUTOFA_NO_MEMORY;
    }
    keys.start();
    const bool done = cpu::run_tasks(attention, tasks, smaller(tasks, threads), executor);
    return done ? AUTOFA_OK : AUTOFA_NO_MEMORY;
  }

  static int64_t workspace_bytes(const autofa_params& params) {
    return serves(params) ? PackedKeys(params).bytes() : 0;
  }
};

}  // namespace autofa::cpu_amx
