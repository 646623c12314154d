// cpu.flash: flash attention forward on CPU. f32, and bf16 and f16 by conversion, always with f32
// accumulation; dense, causal on either corner and explicit masks, grouped heads, any head dims and
// lengths.
//
// A task is one panel of queries of one head, so threads share nothing but a counter, and results
// repeat bit for bit. How many threads there are is felt in the last bits of causal results only,
// and only where panels are narrowed to employ them all.
#pragma once

#include <stdint.h>

#include "autofa/abi.h"
#include "autofa/cpu/workers.h"
#include "config.h"
#include "panel.h"

namespace autofa::cpu_flash {

template <class Config>
class PanelWorker {
  using Type = typename Config::Type;

 public:
  PanelWorker(const autofa_params& params, int64_t threads)
      : params_(params), vectors_((params.seqlen_q + kLanes - 1) / kLanes) {
    const int64_t heads = params.batch * params.heads_q;
    panels_ = (vectors_ + Config::max_vectors - 1) / Config::max_vectors;
    // Narrower panels rather than idle threads.
    if (heads > 0 && heads * panels_ < threads) {
      panels_ = clamp((threads + heads - 1) / heads, panels_, vectors_);
    }
    tasks_ = heads * panels_;
  }

  int64_t tasks() const { return tasks_; }

  PanelMemory<Config>* prepare() const {
    static thread_local PanelMemory<Config> memory;
    return memory.allocate(params_.head_dim, params_.head_dim_v) ? &memory : nullptr;
  }

  void run(int64_t task, const PanelMemory<Config>& memory) const {
    const PanelView<Type> view = locate(task);
    Panel<Config>(params_, view, memory).run();
  }

 private:
  PanelView<Type> locate(int64_t task) const {
    const autofa_params& p = params_;
    const int64_t head = task / panels_ % p.heads_q;
    const int64_t batch = task / panels_ / p.heads_q;
    const int64_t kv_head = head / (p.heads_q / p.heads_kv);
    // The last panels of a causal head are the longest; they go first. Widths differ by at most 1.
    int64_t panel = task % panels_;
    if (p.causal) panel = panels_ - 1 - panel;
    const int64_t narrow = vectors_ / panels_, wide = vectors_ % panels_;
    const int64_t first = (panel * narrow + (panel < wide ? panel : wide)) * kLanes;
    const int vectors = static_cast<int>(narrow + (panel < wide));

    PanelView<Type> view;
    view.q = static_cast<const Type*>(p.q) + batch * p.q_strides[0] + head * p.q_strides[1] +
             first * p.q_strides[2];
    view.k = static_cast<const Type*>(p.k) + batch * p.k_strides[0] + kv_head * p.k_strides[1];
    view.v = static_cast<const Type*>(p.v) + batch * p.v_strides[0] + kv_head * p.v_strides[1];
    view.out = static_cast<Type*>(p.out) + batch * p.out_strides[0] + head * p.out_strides[1] +
               first * p.out_strides[2];
    view.lse = p.lse ? p.lse + (batch * p.heads_q + head) * p.seqlen_q + first : nullptr;
    view.queries = clamp(p.seqlen_q - first, 0, int64_t{vectors} * kLanes);
    view.vectors = vectors;
    view.causal = p.causal != AUTOFA_CAUSAL_NONE;
    view.first = first;
    view.mask = cpu::HeadMask(p, batch, head);
    view.diagonal = first + (p.causal == AUTOFA_CAUSAL_LOWER_RIGHT ? p.seqlen_k - p.seqlen_q : 0);
    return view;
  }

  const autofa_params& params_;
  const int64_t vectors_;
  int64_t panels_;
  int64_t tasks_;
};

template <class Params>
struct Kernel {
  static constexpr int threads = 0;
  static constexpr int smem_bytes = 0;

  // Starting a second thread costs about 3.5 us; below this many multiply-adds it costs more than
  // it saves.
  static constexpr double threading_threshold = 2e5;

  static int32_t launch(const autofa_params& params, const autofa_executor& executor, void*) {
    using Settings = Config<Params>;
    if (params.dtype != Settings::dtype || !cpu::is_known_mask(params) || params.head_dim < 1 ||
        params.head_dim_v < 1 || params.heads_kv < 1 || params.heads_q % params.heads_kv != 0) {
      return AUTOFA_REFUSED;
    }
    const double work = 0.5 * params.batch * params.heads_q * params.seqlen_q * params.seqlen_k *
                        (params.head_dim + params.head_dim_v);
    const int64_t threads = work < threading_threshold ? 1 : executor.num_threads;
    const PanelWorker<Settings> worker(params, threads);
    const int64_t tasks = worker.tasks();
    const bool done = cpu::run_tasks(worker, tasks, tasks < threads ? tasks : threads, executor);
    return done ? AUTOFA_OK : AUTOFA_NO_MEMORY;
  }

  static int64_t workspace_bytes(const autofa_params&) { return 0; }
};

}  // namespace autofa::cpu_flash
