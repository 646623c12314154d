"""Tunes that end early, go on, meet another one, or come after an upgrade; simulated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from store_samples import PROVENANCE, make_row
from tuning_simulation import DEVICE, Simulation
from tuning_world import BEST, PROBLEMS, ask, run, stored, times, winner

from autofa.problem import Problem
from autofa.store.repository import Repository
from autofa.tuning import lab
from autofa.tuning.control import Interrupted, StopToken
from autofa.tuning.events import (
    BucketDone,
    BucketStarted,
    Estimate,
    Event,
    TuneStarted,
)
from autofa.tuning.lab import Clock


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "autofa.db")


def test_a_second_tune_measures_nothing(db: str) -> None:
    run(Simulation(times), ask(db, PROBLEMS))
    before = stored(db)
    sim = Simulation(times)
    events: list[Event] = []
    summary = run(sim, ask(db, PROBLEMS), events.append)
    assert (sim.checked, sim.timed, sim.compiled) == ([], [], [])
    assert stored(db) == before
    assert summary.measured == 0
    assert summary.reused > 0
    assert summary.exit_code == 0
    assert [b.winner for b in summary.buckets] == [BEST] * len(PROBLEMS)
    assert TuneStarted(DEVICE, db, len(PROBLEMS), len(PROBLEMS)) in events
    assert not [e for e in events if isinstance(e, BucketStarted)]


def test_force_measures_again(db: str) -> None:
    run(Simulation(times), ask(db))
    sim = Simulation(times)
    assert run(sim, ask(db, force=True)).measured > 0
    assert BEST in {slug for slug, _ in sim.timed}


def test_more_trials_go_on_where_fewer_stopped(db: str) -> None:
    run(Simulation(times), ask(db, trials=4))
    first = {r.slug for r in stored(db) if r.slug.startswith("sim")}
    assert len(first) == 4
    sim = Simulation(times)
    run(sim, ask(db, trials=8))
    checked = {slug for slug, _ in sim.checked if slug.startswith("sim")}
    assert len({r.slug for r in stored(db) if r.slug.startswith("sim")}) == 8
    assert len(checked - first) == 4


def test_rows_of_other_versions_are_retimed_not_searched_anew(db: str) -> None:
    run(Simulation(times), ask(db))
    sim = Simulation(times, version="test-compiler 2")
    events: list[Event] = []
    run(sim, ask(db), events.append)
    retimed = {slug for slug, _ in sim.timed if slug.startswith("sim")}
    assert BEST in retimed
    assert "sim.fast-mx1-nx1" in retimed, "the default"
    assert len(retimed) <= 6
    assert [e.retime for e in events if isinstance(e, BucketStarted)] == [True]
    last = Simulation(times, version="test-compiler 2")
    run(last, ask(db))
    assert last.timed == []


def test_where_the_order_changed_the_search_is_done_anew(db: str) -> None:
    run(Simulation(times), ask(db))

    def inverted(slug: str, problem: Problem) -> float:
        return 3.0 / times(slug, problem) if slug.startswith("sim.fast") else times(slug, problem)

    sim = Simulation(inverted, version="test-compiler 2")
    run(sim, ask(db))
    assert len({slug for slug, _ in sim.timed if slug.startswith("sim.fast")}) == 10


def test_the_budget_is_the_whole_wall_time_and_keeps_everything(db: str) -> None:
    sim = Simulation(times)
    sim.on_step = lambda: time.sleep(0.02)
    began = time.monotonic()
    summary = run(sim, ask(db, PROBLEMS, budget_s=1.0))
    assert time.monotonic() - began < 2.5
    assert summary.budget_spent
    assert summary.answered < len(PROBLEMS)
    assert summary.exit_code == (3 if summary.answered else 1)
    assert stored(db)
    finished = {b.problem for b in summary.buckets if b.complete}
    rest = Simulation(times)
    summary = run(rest, ask(db, PROBLEMS))
    assert (summary.exit_code, summary.budget_spent) == (0, False)
    assert not finished & {problem for _, problem in rest.checked}


def test_a_budget_is_shared_among_the_buckets(db: str) -> None:
    """A long search in the first does not starve the others of their precise rounds."""
    sim = Simulation(times)
    sim.on_step = lambda: time.sleep(0.01)
    summary = run(sim, ask(db, PROBLEMS, budget_s=2.0))
    assert summary.answered == len(PROBLEMS)


def test_buckets_without_any_result_come_first(db: str) -> None:
    run(Simulation(times), ask(db, PROBLEMS[:1], trials=2))
    events: list[Event] = []
    run(Simulation(times), ask(db, PROBLEMS[:3]), events.append)
    started = [e.problem for e in events if isinstance(e, BucketStarted)]
    assert started == [PROBLEMS[1], PROBLEMS[2], PROBLEMS[0]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after", [1, 7, 20, 33])
def test_an_interrupt_keeps_what_is_done_and_the_next_tune_goes_on(
    db: str, number: int, after: int
) -> None:
    sim = Simulation(times)
    steps = iter(range(10**6))

    def interrupt() -> None:
        if next(steps) == after:
            raise Interrupted(number)

    sim.on_step = interrupt
    summary = run(sim, ask(db, PROBLEMS[:3]))
    assert summary.interrupted == number
    assert summary.exit_code == 128 + number
    assert sim.closed == 1
    finished = {b.problem for b in summary.buckets if b.complete}
    rest = Simulation(times)
    assert run(rest, ask(db, PROBLEMS[:3])).exit_code == 0
    assert not finished & {problem for _, problem in rest.timed}
    assert all(winner(db, problem) == BEST for problem in PROBLEMS[:3])
    assert len(sim.timed) + len(rest.timed) < 2 * 3 * 20


def test_a_token_cancels_from_another_thread(db: str) -> None:
    token = StopToken()
    sim = Simulation(times)
    sim.on_step = lambda: time.sleep(0.01)
    timer = threading.Timer(0.2, token.cancel)
    timer.start()
    summary = run(sim, ask(db, PROBLEMS), token=token)
    timer.join()
    assert len(summary.buckets) < len(PROBLEMS) or not all(b.complete for b in summary.buckets)
    assert summary.interrupted is None


def test_the_estimate_falls_to_nothing(db: str) -> None:
    events: list[Event] = []
    run(Simulation(times), ask(db, PROBLEMS), events.append)
    estimates = [e for e in events if isinstance(e, Estimate)]
    done = [e.done for e in estimates]
    assert done == sorted(done)
    assert set(done) == set(range(len(PROBLEMS) + 1))
    assert estimates[0].remaining_s > 0
    assert estimates[-1].remaining_s == 0
    assert len([e for e in events if isinstance(e, BucketDone)]) == len(PROBLEMS)


def test_two_tunes_on_one_database_share_the_work(db: str) -> None:
    code = Path(__file__).with_name("tuning_second_process.py")
    environment = {**os.environ, "PYTHONPATH": str(code.parent.parent)}
    other = subprocess.Popen([sys.executable, str(code), db], env=environment)
    sim = Simulation(times)
    sim.on_step = lambda: time.sleep(0.03)
    summary = run(sim, ask(db, PROBLEMS))
    assert other.wait(60) == 0
    assert summary.exit_code == 0
    kept = Counter((r.problem, r.slug, r.run) for r in stored(db))
    assert max(kept.values()) == 1
    defaults = Counter(r.problem for r in stored(db) if r.slug == "sim.slow-mx2")
    assert set(defaults.values()) == {1}, "each bucket was searched by one of the two"


UPGRADES = [{"version": "test-compiler 2"}, {"torch": "2.0.1"}, {"driver": "581"}]


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize("upgrade", UPGRADES, ids=lambda upgrade: next(iter(upgrade)))
def test_an_upgrade_is_tried_on_the_best_few_and_the_default(
    db: str, upgrade: dict[str, str], noise: float
) -> None:
    """A tenth of the first tune's samples, and fewer checks, keep every winner."""
    first = Simulation(times, noise, torch="2.0.0", driver="580")
    before = run(first, ask(db, PROBLEMS, trials=24))
    options = {"torch": "2.0.0", "driver": "580", **upgrade}
    second = Simulation(times, noise, **options)  # type: ignore[arg-type]
    after = run(second, ask(db, PROBLEMS, trials=24))
    assert {p for _, p in second.timed} == set(PROBLEMS)
    assert second.samples <= 0.1 * first.samples
    assert len(second.checked) <= 0.5 * len(first.checked)
    for problem, was, now in zip(PROBLEMS, before.buckets, after.buckets, strict=True):
        assert now.winner == was.winner, problem
        assert now.complete
    last = Simulation(times, noise, **options)  # type: ignore[arg-type]
    run(last, ask(db, PROBLEMS, trials=24))
    assert last.timed == []


def searched(sim: Simulation) -> set[str]:
    return {slug for slug, _ in sim.timed if slug.startswith("sim")}


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_an_upgrade_that_changed_sdpa_alone_starts_no_search(db: str, noise: float) -> None:
    """What was not re-timed has a ratio to the SDPA of before, which now looks too good."""
    before = run(Simulation(times, noise), ask(db, PROBLEMS, trials=24))

    def faster_sdpa(slug: str, problem: Problem) -> float:
        return times(slug, problem) * (0.85 if slug == "torch.sdpa" else 1.0)

    sim = Simulation(faster_sdpa, noise, torch="2.0.1")
    after = run(sim, ask(db, PROBLEMS, trials=24))
    assert len(searched(sim)) <= 4
    assert [b.winner for b in after.buckets] == [b.winner for b in before.buckets]
    assert run(Simulation(faster_sdpa, torch="2.0.1"), ask(db, PROBLEMS, trials=24)).measured == 0


def test_few_rounds_do_not_undo_what_many_told_apart(db: str) -> None:
    """A simpler kernel within the noise of a re-timing stays behind."""

    def close(slug: str, problem: Problem) -> float:
        return times(BEST, problem) * 1.012 if slug == "sim.fast-mx1-nx1" else times(slug, problem)

    run(Simulation(close), ask(db, PROBLEMS))
    assert {winner(db, problem) for problem in PROBLEMS} == {BEST}
    sim = Simulation(close, 0.03, torch="2.0.1")
    run(sim, ask(db, PROBLEMS))
    assert {winner(db, problem) for problem in PROBLEMS} == {BEST}


def test_a_runner_up_that_an_upgrade_made_the_best_wins_without_a_search(db: str) -> None:
    run(Simulation(times), ask(db))
    second = "sim.fast-mx4-nx1"

    def overtaken(slug: str, problem: Problem) -> float:
        return times(BEST, problem) * 0.93 if slug == second else times(slug, problem)

    sim = Simulation(overtaken, torch="2.0.1")
    (bucket,) = run(sim, ask(db)).buckets
    assert bucket.winner == second
    assert len(searched(sim)) <= 4


def test_a_default_that_an_upgrade_made_the_best_is_found(db: str) -> None:
    """Though it was far from the best few before."""
    run(Simulation(times), ask(db))

    def default_wins(slug: str, problem: Problem) -> float:
        return times(slug, problem) * (0.1 if slug == "sim.fast-mx1-nx1" else 1.0)

    (bucket,) = run(Simulation(default_wins, torch="2.0.1"), ask(db)).buckets
    assert bucket.winner == "sim.fast-mx1-nx1"


def test_what_fails_after_an_upgrade_gives_way_to_the_next_best(db: str) -> None:
    run(Simulation(times), ask(db))
    sim = Simulation(times, torch="2.0.1", check_fails={BEST: "wrong_result"})
    (bucket,) = run(sim, ask(db)).buckets
    assert bucket.winner not in (None, BEST)
    assert winner(db, PROBLEMS[0]) == bucket.winner
    assert len(searched(sim)) >= 9, "what was measured then is no guide"
    assert bucket.complete


@pytest.mark.parametrize("stop", [False, True])
def test_the_final_of_a_resumed_search_has_the_best_of_all_runs(db: str, stop: bool) -> None:
    """What an earlier run found stands beside what this one found, in the same precise rounds; also
    where that run ended between its search and its final."""
    run(Simulation(times), ask(db, trials=2 if stop else 6))
    if stop:
        interrupted = Simulation(times)
        time_all = interrupted.time

        def ends(entrants: object, problem: Problem, plan: object = None, **how: object) -> object:
            if plan.max_rounds > 20:  # type: ignore[attr-defined]
                raise Interrupted(signal.SIGINT)
            return time_all(entrants, problem, plan)  # type: ignore[arg-type]

        interrupted.time = ends  # type: ignore[assignment, method-assign]
        assert run(interrupted, ask(db, trials=12)).interrupted
    run(Simulation(times), ask(db, trials=12))
    rows = {row.slug: row for row in stored(db, PROBLEMS[0])}  # the newest of each
    precise = [row for row in rows.values() if row.run == rows[BEST].run]
    best = sorted(
        (slug for slug in rows if slug.startswith("sim.fast")),
        key=lambda slug: times(slug, PROBLEMS[0]),
    )
    assert {row.slug for row in precise} >= set(best[:4])
    assert all(row.samples > 9 for row in precise)
    again = Simulation(times)
    run(again, ask(db, trials=12))
    assert again.timed == []


class Jumping(datetime):
    """A wall clock that is set by hand."""

    year_now = 2030

    @classmethod
    def now(cls, tz: object = None) -> Jumping:
        return cls(cls.year_now, 1, 1, tzinfo=timezone.utc)


@pytest.mark.parametrize("stamp", ["2031-02-03T04:05:06Z", "2031-02-03T04:05:06.123456789+00:00"])
def test_a_clock_that_was_put_back_orders_rows_as_they_were_made(
    db: str, monkeypatch: pytest.MonkeyPatch, stamp: str
) -> None:
    """What is measured now counts, not what was measured when the clock was ahead."""
    monkeypatch.setattr(lab, "datetime", Jumping)
    run(Simulation(times), ask(db))
    old = stored(db)[-1]
    with Repository.open(db, write=True) as repository:
        repository.add([replace(old, provenance=replace(old.provenance, created_at=stamp))])
    monkeypatch.setattr(Jumping, "year_now", 2020)

    def default_wins(slug: str, problem: Problem) -> float:
        return times(slug, problem) * (0.1 if slug == "sim.fast-mx1-nx1" else 1.0)

    (bucket,) = run(Simulation(default_wins, torch="2.0.1"), ask(db)).buckets
    assert bucket.winner == winner(db, PROBLEMS[0]) == "sim.fast-mx1-nx1"
    last = Simulation(default_wins, torch="2.0.1")
    run(last, ask(db))
    assert last.timed == []
    made = [row.provenance.created_at for row in stored(db)]
    assert len(set(made)) == len(made)


@pytest.mark.parametrize("stamp", ["9999-12-31T23:59:59.999999Z", "2999-19-39T99:99:99Z"])
def test_a_row_that_no_clock_made_does_not_stop_the_clock(stamp: str) -> None:
    clock = Clock()
    row = make_row(provenance=replace(PROVENANCE, created_at=stamp))
    clock.saw([row])
    assert clock.now() < row.provenance.created_at
