// Runs numbered tasks on the threads an executor offers.
#pragma once

#include <stdint.h>

#include <atomic>

#include "autofa/abi.h"

namespace autofa::cpu {

// Calls worker.prepare() once per thread, then worker.run(task) for tasks 0, 1, ... in that order
// of starting; a thread takes the next one when it is free (a static split was 5-25 % slower on
// causal problems). A thread whose prepare() returns null takes none. True if every task ran; else
// no thread was prepared and none did. `Worker` has `State* prepare() const` and
// `void run(int64_t task, State&) const`.
template <class Worker>
bool run_tasks(const Worker& worker, int64_t tasks, int64_t threads,
               const autofa_executor& executor) {
  struct Shared {
    const Worker& worker;
    const int64_t tasks;
    std::atomic<int64_t> next{0};

    static void take(int64_t, int64_t, void* self) {
      Shared& shared = *static_cast<Shared*>(self);
      const auto state = shared.worker.prepare();
      if (!state) return;
      for (;;) {
        const int64_t task = shared.next.fetch_add(1, std::memory_order_relaxed);
        if (task >= shared.tasks) return;
        shared.worker.run(task, *state);
      }
    }
  };
  Shared shared{worker, tasks};
  if (threads > 1 && executor.parallel_for) {
    executor.parallel_for(0, threads, 1, Shared::take, &shared);
  } else {
    Shared::take(0, 1, &shared);
  }
  return shared.next.load(std::memory_order_relaxed) >= tasks;
}

}  // namespace autofa::cpu
