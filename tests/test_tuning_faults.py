"""What goes wrong around a tune costs what it hits and nothing else: memory, compilers, the cache,
the database's lock, somebody else's load."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tuning_simulation import DEVICE, PROBLEM, Simulation, family, registry

from autofa.bench import memory
from autofa.bench.client import Entrant, NoRoomError
from autofa.bench.protocol import Outcome, Plan, TimingRun
from autofa.compiler import Build
from autofa.errors import StoreLockedError, UsageError
from autofa.kernels.registry import Candidate
from autofa.problem import Problem
from autofa.settings import Settings
from autofa.store.doubt import doubt
from autofa.store.repository import Repository
from autofa.store.rows import Row
from autofa.tuning import control, session
from autofa.tuning.events import BucketDone, Event, Notice, Summary
from autofa.tuning.hardware import open_lab
from autofa.tuning.request import TuneRequest
from autofa.tuning.session import tune

FAMILY = family("sim.own", {"m": (1, 2, 4)})
REGISTRY = registry(FAMILY)
OTHER = replace(PROBLEM, mask="causal")
HUGE = replace(PROBLEM, batch=1 << 24, seqlen_q=1 << 16)


def times(slug: str, problem: Problem) -> float:
    return 0.5 if slug.startswith("sim.") else 1.0


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "autofa.db")


def ask(db: str, *problems: Problem, **options: object) -> TuneRequest:
    request = TuneRequest(problems or (PROBLEM,), "cpu", db, registry=REGISTRY)
    return replace(request, **options)  # type: ignore[arg-type]


def run(sim: Simulation, request: TuneRequest) -> tuple[Summary, list[str]]:
    """The summary, and the notices."""
    events: list[Event] = []
    summary = tune(request, events.append, laboratory=sim.laboratory)
    return summary, [event.message for event in events if isinstance(event, Notice)]


def stored(db: str, problem: Problem = PROBLEM) -> list[Row]:
    with Repository.open(db, write=False) as repository:
        return [row for row in repository.rows(device=DEVICE) if row.problem == problem]


# ---- memory ----


@dataclass
class Cramped(Simulation):
    """A device whose memory does not suffice for one problem."""

    too_big: Problem = PROBLEM

    def check(
        self, candidate: Candidate, library: Path | None, problem: Problem, **how: object
    ) -> Outcome:
        if problem == self.too_big:
            raise NoRoomError("inputs and reference do not fit: can't allocate memory")
        return super().check(candidate, library, problem, **how)


def test_a_problem_beyond_memory_costs_its_own_bucket(db: str) -> None:
    summary, notices = run(Cramped(times), ask(db, PROBLEM, OTHER))
    assert [bucket.winner is None for bucket in summary.buckets] == [True, False]
    assert (summary.exit_code, summary.failures) == (3, (("out_of_memory", 1),))
    assert summary.buckets[0].failed == 1
    assert [n for n in notices if "1,8,512,64 f32 none: out_of_memory: inputs and" in n]
    assert stored(db) == []
    summary, _ = run(Simulation(times), ask(db, PROBLEM, OTHER))
    assert summary.exit_code == 0


def test_what_cannot_fit_is_refused_before_any_work(db: str) -> None:
    sim = Simulation(times)
    with pytest.raises(UsageError, match=r"take at least [0-9.]+ GiB; supported: "):
        run(sim, ask(db, HUGE))
    assert (sim.checked, sim.timed, sim.compiled) == ([], [], [])
    summary, notices = run(sim, ask(db, HUGE, PROBLEM))
    assert [bucket.winner is None for bucket in summary.buckets] == [True, False]
    assert [n for n in notices if n.startswith(f"left out: shape {HUGE.shape}")]
    assert {problem for _, problem in sim.checked} == {PROBLEM}
    assert summary.exit_code == 3


def test_the_least_that_a_measurement_holds() -> None:
    one = Problem("f16", 2, 8, 4, 100, 300, 64, 32, "none", "cpu")
    inputs = 2 * (8 * 100 * 64 + 4 * 300 * 64 + 4 * 300 * 32) * 2
    output = 2 * 8 * 100 * 32 * 2
    assert memory.needed_bytes(one) == inputs + 2 * output
    masked = replace(one, mask="bool")
    assert memory.needed_bytes(masked) == inputs + 2 * output + 2 * 100 * 300 * 4
    gpu = replace(DEVICE, kind="cuda", memory_gib=80)
    assert memory.refusal(replace(HUGE, batch=1, seqlen_q=1 << 20), gpu) is None
    assert "80.0 GiB (the memory of Simulated CPU)" in (memory.refusal(HUGE, gpu) or "")


# ---- the budget ----


@dataclass
class Endless(Simulation):
    """A device on which one kernel never comes back, were it not for the poll."""

    slow: str = ""
    measures: str = "check"

    def _hang(self, here: bool, poll: object) -> None:
        while here:
            time.sleep(0.01)
            poll()  # type: ignore[operator]

    def check(
        self, candidate: Candidate, library: Path | None, problem: Problem, **how: object
    ) -> Outcome:
        self._hang(self.measures == "check" and candidate.slug == self.slow, how["poll"])
        return super().check(candidate, library, problem, **how)

    def time(
        self, entrants: Sequence[Entrant], problem: Problem, plan: Plan | None = None, **how: object
    ) -> TimingRun:
        slugs = [entrant.candidate.slug for entrant in entrants]
        self._hang(self.measures == "time" and self.slow in slugs, how["poll"])
        return super().time(entrants, problem, plan, **how)


@pytest.mark.parametrize("measures", ["check", "time"])
def test_the_budget_ends_what_the_worker_is_busy_with(
    db: str, measures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "GRACE_S", 0.2)
    sim = Endless(times, slow="torch.flash", measures=measures)
    began = time.monotonic()
    summary, _ = run(sim, ask(db, budget_s=0.3))
    assert time.monotonic() - began < 3
    assert summary.budget_spent
    assert not summary.buckets[0].complete
    assert sim.closed == 1


def test_what_needs_no_compiler_is_measured_before_it_is_waited_for(db: str) -> None:
    release = threading.Event()

    class Stuck(Simulation):
        """Its compiler does not come back before the end of the test."""

        def build(self, *args: Any, **how: Any) -> list[Build]:
            release.wait(20)
            return super().build(*args, **how)

    sim = Stuck(times, built={"sim.own-mx2"})
    try:
        summary, _ = run(sim, ask(db, budget_s=0.5))
    finally:
        release.set()
    assert summary.buckets[0].winner == "sim.own-mx2"
    assert not summary.buckets[0].complete
    assert {"torch.sdpa", "torch.flash", "sim.own-mx2"} <= {row.slug for row in stored(db)}
    # These were not the precise rounds: the same command goes on with them.
    again = Simulation(times, built={"sim.own-mx2"})
    summary, _ = run(again, ask(db))
    assert summary.buckets[0].complete
    assert again.timed.count(("torch.flash", PROBLEM)) == 1
    assert sorted(again.compiled) == ["sim.own-mx1", "sim.own-mx4"]
    assert run(Simulation(times), ask(db))[0].measured == 0


def test_a_compiler_may_take_a_part_of_the_budget_to_answer(
    db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = tmp_path / "hung-g++"
    hung.write_text("#!/bin/sh\nexec sleep 60\n")
    hung.chmod(0o755)
    settings = Settings(cxx=(str(hung),), search_path="/usr/bin:/bin", cache_dir=tmp_path)
    with open_lab(ask(db, budget_s=1.0, settings=settings)) as lab:
        assert "gave no answer in 2 s" in lab.builder.problem


# ---- other work on the machine ----


@dataclass
class Crowded(Simulation):
    """The first `crowded` precise rounds are disturbed: plain SDPA looks 50 times slower."""

    crowded: int = 1
    finals: int = 0
    spread: float = 0.0

    def time(
        self, entrants: Sequence[Entrant], problem: Problem, plan: Plan | None = None, **how: object
    ) -> TimingRun:
        run = super().time(entrants, problem, plan, **how)
        if plan is None or plan.max_rounds == plan.screen_rounds:
            return run
        self.finals += 1
        if self.finals > self.crowded:
            return run
        outcomes = []
        for o in run.outcomes:
            assert o.baseline is not None
            slow = replace(o.baseline, call_ms=50.0, call_spread=self.spread)
            outcomes.append(replace(o, baseline=slow))
        waited = "{}" if self.spread else '{"waited": 0.4}'
        return replace(run, outcomes=tuple(outcomes), conditions=waited)


@pytest.mark.parametrize("spread", [0.0, 0.8])
def test_disturbed_precise_rounds_are_repeated_once(db: str, spread: float) -> None:
    sim = Crowded(times, spread=spread)
    summary, notices = run(sim, ask(db))
    assert summary.buckets[0].speedup == pytest.approx(2.0)
    assert sim.finals == 2
    assert not any(doubt(row, "eager") for row in stored(db))
    assert notices == []


@pytest.mark.parametrize("spread", [0.0, 0.8])
def test_what_stays_disturbed_is_flagged(db: str, spread: float) -> None:
    sim = Crowded(times, crowded=1000, spread=spread)
    _, notices = run(sim, ask(db))
    assert sim.finals == 2
    assert [n for n in notices if "disturbed the timing of 1 of 1 buckets" in n]
    final = [row for row in stored(db) if row.slug == "torch.flash"][-1]
    said = doubt(final, "eager")
    assert (
        "plain SDPA beside it known to 80%" if spread else "its threads had to wait for cores"
    ) in said
    assert run(Simulation(times), ask(db))[0].measured == 0


# ---- the cache ----


@dataclass
class Vanishing(Simulation):
    """The library of one kernel is lost `losses` times just before the worker loads it."""

    victim: str = "sim.own-mx2"
    losses: int = 1
    when: str = "check"

    def _lose(self, when: str, slug: str) -> bool:
        lost = when == self.when and slug == self.victim and self.losses > 0
        if lost:
            self.losses -= 1
            self.built.discard(slug)
        return lost

    def check(
        self, candidate: Candidate, library: Path | None, problem: Problem, **how: object
    ) -> Outcome:
        if self._lose("check", candidate.slug):
            return Outcome(candidate.slug, "crashed", "died of SIGBUS")
        return super().check(candidate, library, problem, **how)

    def time(
        self, entrants: Sequence[Entrant], problem: Problem, plan: Plan | None = None, **how: object
    ) -> TimingRun:
        lost = {e.candidate.slug for e in entrants if self._lose("time", e.candidate.slug)}
        run = super().time(entrants, problem, plan, **how)
        outcomes = (
            Outcome(o.slug, "launch_error", "cannot open") if o.slug in lost else o
            for o in run.outcomes
        )
        return replace(run, outcomes=tuple(outcomes))


@pytest.mark.parametrize("when", ["check", "time"])
def test_a_library_that_is_lost_is_compiled_again_and_no_failure(db: str, when: str) -> None:
    sim = Vanishing(times, when=when)
    summary, _ = run(sim, ask(db))
    assert sim.compiled.count(sim.victim) == 2
    assert {row.status for row in stored(db)} == {"ok"}
    assert sim.victim in {row.slug for row in stored(db)}
    assert (summary.exit_code, summary.failed) == (0, 0)


@pytest.mark.parametrize("when", ["check", "time"])
def test_a_cache_that_keeps_nothing_leaves_no_failure_behind(db: str, when: str) -> None:
    sim = Vanishing(times, when=when, losses=1000)
    summary, _ = run(sim, ask(db))
    assert sim.victim not in {row.slug for row in stored(db)}
    assert summary.failed == 0
    assert "sim.own-mx1" in {row.slug for row in stored(db)}


# ---- the database's lock ----


@pytest.fixture
def holder(db: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """Another process's connection to the database, not yet holding its lock."""
    monkeypatch.setattr(session, "LOCK_S", 0.05)
    Repository.open(db, write=True).close()
    with closing(sqlite3.connect(db, isolation_level=None, check_same_thread=False)) as connection:
        yield connection


def test_results_are_kept_while_another_holds_the_database(
    db: str, holder: sqlite3.Connection
) -> None:
    sim = Simulation(times)
    sim.on_step = lambda: holder.in_transaction or holder.execute("BEGIN IMMEDIATE")  # type: ignore[assignment]
    release = threading.Timer(1.0, lambda: holder.execute("ROLLBACK"))
    finish = sim.close

    def close() -> None:
        finish()
        release.join()

    sim.close = close  # type: ignore[method-assign]
    monitored: list[Event] = []

    def listen(event: Event) -> None:
        monitored.append(event)
        if isinstance(event, BucketDone) and len(sim.checked) > 8:
            sim.on_step = lambda: None
            release.start()

    request = ask(db, PROBLEM, OTHER)
    summary = tune(request, listen, laboratory=sim.laboratory)
    assert summary.exit_code == 0
    notices = [event.message for event in monitored if isinstance(event, Notice)]
    assert len([n for n in notices if "locked by another process; results are kept" in n]) == 1
    for problem in (PROBLEM, OTHER):
        assert {"torch.sdpa", "sim.own-mx1", "sim.own-mx4"} <= {
            row.slug for row in stored(db, problem)
        }
    assert run(Simulation(times), request)[0].measured == 0


def test_a_database_that_never_comes_free_is_an_error_with_the_number_lost(
    db: str, holder: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PATIENCE_S", 0.2)
    sim = Simulation(times)
    sim.on_step = lambda: holder.in_transaction or holder.execute("BEGIN IMMEDIATE")  # type: ignore[assignment]
    with pytest.raises(StoreLockedError, match=r"[0-9]+ results are lost"):
        run(sim, ask(db))
    assert sim.closed == 1
