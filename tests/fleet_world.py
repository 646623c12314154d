"""Workers of a fleet on the simulated device, each a process, and what they left on the server."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optuna
from store_processes import PROCESSES
from tuning_simulation import Simulation
from tuning_world import PROBLEMS, ask, run, stored, times

from autofa.problem import Problem
from autofa.tuning import fleet, studies
from autofa.tuning.events import Event, Notice
from autofa.tuning.records import is_screened

SHAPES = PROBLEMS[:3]
TRIALS = 10  # per problem, of 13 points
_PATIENCE_S = 60


@dataclass
class Worker:
    """A process that tunes; `hangs` is set once it hangs in the middle of a step, as told to."""

    process: Any
    hangs: Any
    notices: Any

    @property
    def told(self) -> list[str]:
        found = []
        while not self.notices.empty():
            found.append(self.notices.get())
        return found


def _work(url: str, worker: Worker, step_s: float, hang_after: int | None, grace_s: int) -> None:
    studies.HEARTBEAT_S, studies.GRACE_S, fleet._POLL_S = 1, grace_s, 0.2
    steps = 0

    def on_step() -> None:
        nonlocal steps
        steps += 1
        if steps == hang_after:
            worker.hangs.set()
            time.sleep(_PATIENCE_S)
        time.sleep(step_s)

    def on_event(event: Event) -> None:
        if isinstance(event, Notice):
            worker.notices.put(event.message)

    sim = Simulation(times)
    sim.on_step = on_step
    # Straight out: what pytest has open in this process is the parent's to close.
    os._exit(run(sim, ask(url, SHAPES, trials=TRIALS), on_event).exit_code)


@contextmanager
def workers(
    url: str,
    count: int,
    *,
    step_s: float = 0.02,
    first_hangs_after: int | None = None,
    grace_s: int = 60,
) -> Iterator[list[Worker]]:
    """So many workers; whatever becomes of the test, they end with it."""
    found: list[Worker] = []
    try:
        for index in range(count):
            worker = Worker(None, PROCESSES.Event(), PROCESSES.SimpleQueue())
            hang = first_hangs_after if index == 0 else None
            worker.process = PROCESSES.Process(
                target=_work, args=(url, worker, step_s, hang, grace_s)
            )
            worker.process.start()
            found.append(worker)
        yield found
    finally:
        for worker in found:
            worker.process.kill()
            worker.process.join()


def join(found: list[Worker]) -> list[int]:
    """Exit codes, once all have ended."""
    deadline = time.monotonic() + _PATIENCE_S
    for worker in found:
        worker.process.join(max(0.0, deadline - time.monotonic()))
    return [worker.process.exitcode for worker in found]


def kill(worker: Worker) -> None:
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.join()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def searched(url: str) -> Counter[tuple[Problem, str]]:
    """How often each kernel of ours was measured in each problem's search."""
    rows = [row for row in stored(url) if row.slug.startswith("sim.")]
    return Counter((row.problem, row.slug) for row in rows if is_screened(row))


def trials(storage: optuna.storages.BaseStorage) -> list[optuna.trial.FrozenTrial]:
    """Of all studies."""
    return [
        trial
        for study in storage.get_all_studies()
        for trial in storage.get_all_trials(study._study_id)
    ]


@contextmanager
def server_storage(url: str) -> Iterator[optuna.storages.RDBStorage]:
    """As somebody opens it who knows nothing of ours."""
    storage = optuna.storages.RDBStorage(url)
    try:
        yield storage
    finally:
        storage.engine.dispose()
