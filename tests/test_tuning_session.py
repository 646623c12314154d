"""A whole tune on a simulated device: what is measured, stored and told."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuning_simulation import LIMITS, Simulation, family, registry
from tuning_world import BEST, FAST, PROBLEMS, SLOW, ask, run, stored, times, winner

from autofa.compiler import Build
from autofa.problem import Problem, bucket_of
from autofa.tuning.events import (
    CandidateDone,
    Event,
    Notice,
)


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "autofa.db")


@pytest.mark.parametrize("overlap", [False, True])
def test_every_bucket_gets_its_best_kernel_beside_all_vendors(db: str, overlap: bool) -> None:
    sim = Simulation(times, overlap=overlap)
    summary = run(sim, ask(db, PROBLEMS))
    assert [b.winner for b in summary.buckets] == [BEST] * len(PROBLEMS)
    assert all(b.speedup == pytest.approx(2.0) and b.complete for b in summary.buckets)
    assert (summary.exit_code, summary.answered, summary.failed) == (0, len(PROBLEMS), 0)
    for problem in PROBLEMS:
        rows = [r for r in stored(db, problem) if r.status == "ok"]
        slugs = {r.slug for r in rows}
        assert {"torch.sdpa", "torch.flash", "torch.unfused", BEST} <= slugs
        assert winner(db, problem) == BEST
        base = [r for r in rows if r.slug == "torch.sdpa"][-1]
        assert {r.slug for r in rows if r.run == base.run} >= {"torch.sdpa", "torch.flash", BEST}
    assert sim.closed == 1


def test_a_slow_family_is_known_for_it_in_the_next_bucket_and_left_out_of_the_precise_rounds(
    db: str,
) -> None:
    sim = Simulation(times)
    first, second = PROBLEMS[:2]
    assert run(sim, ask(db, (first, second))).answered == 2
    tried = Counter((slug, p) for slug, p in sim.timed if slug.startswith("sim.slow"))
    default, other = (v.slug for v in SLOW.legal(first, LIMITS))
    assert tried == {(default, first): 1, (other, first): 1, (default, second): 1}
    assert Counter(sim.timed)[BEST, first] == 2


def test_candidates_are_checked_before_they_are_timed_and_the_winner_again_after(db: str) -> None:
    order: list[str] = []
    sim = Simulation(times)
    sim.on_step = lambda: order.append("step")
    run(sim, ask(db))
    checks = Counter(slug for slug, _ in sim.checked)
    assert {slug for slug, _ in sim.timed} <= set(checks)
    assert checks[BEST] == 2
    assert sim.checked[-1][0] == BEST
    assert all(count == 1 for slug, count in checks.items() if slug != BEST)


def test_a_new_shape_of_a_tuned_bucket_is_measured_itself(db: str) -> None:
    run(Simulation(times), ask(db))
    other = replace(PROBLEMS[0], seqlen_q=120, seqlen_k=120)
    assert bucket_of(other) == bucket_of(PROBLEMS[0])
    assert run(Simulation(times), ask(db, (other,))).measured > 0
    assert {r.problem for r in stored(db)} == {PROBLEMS[0], other}


def test_a_noisy_device_gives_winners_that_are_within_the_noise(db: str) -> None:
    """T01: five tunes under 3% noise; each winner's true time is near the best."""
    for seed in range(5):
        path = f"{db}{seed}"
        sim = Simulation(times, noise=0.03)
        sim.random.seed(seed)
        run(sim, ask(path))
        found = winner(path, PROBLEMS[0])
        assert times(found, PROBLEMS[0]) <= 1.06 * times(BEST, PROBLEMS[0])


def test_the_winner_was_in_the_precise_rounds(db: str) -> None:
    sim = Simulation(times, noise=0.05)
    run(sim, ask(db))
    found = winner(db, PROBLEMS[0])
    assert max(r.samples for r in stored(db) if r.slug == found) > 7


def test_nothing_better_than_sdpa_keeps_sdpa(db: str) -> None:
    def same(slug: str, problem: Problem) -> float:
        return 1.0 if slug in ("torch.sdpa", BEST) else 1.5

    summary = run(Simulation(same, noise=0.01), ask(db))
    (bucket,) = summary.buckets
    assert (bucket.winner, bucket.speedup) == ("torch.sdpa", 1.0)
    assert summary.exit_code == 0


FAILURES = {
    "sim.fast-mx1-nx1": "crashed",
    "sim.fast-mx1-nx2": "timeout",
    "sim.fast-mx4-nx2": "wrong_result",
    "sim.fast-mx2-nx2": "out_of_memory",
    "torch.flash": "launch_error",
}


def test_failures_are_rows_and_never_win(db: str) -> None:
    sim = Simulation(times, check_fails=FAILURES, build_fails={"sim.slow-mx1": "compile_error"})
    events: list[Event] = []
    summary = run(sim, ask(db), events.append)
    rows = {r.slug: r for r in stored(db)}
    for slug, status in (FAILURES | {"sim.slow-mx1": "compile_error"}).items():
        assert rows[slug].status == status
        assert rows[slug].time_ms is None
    assert not {slug for slug, _ in sim.timed} & set(FAILURES)
    (bucket,) = summary.buckets
    assert bucket.winner not in FAILURES
    assert bucket.winner is not None
    assert bucket.winner.startswith("sim.fast")
    assert (bucket.failed, summary.failed, summary.exit_code) == (6, 6, 0)
    assert dict(summary.failures)["crashed"] == 1
    told = {e.slug: e.status for e in events if isinstance(e, CandidateDone) if e.status != "ok"}
    assert told == FAILURES | {"sim.slow-mx1": "compile_error"}


def test_failures_are_not_tried_again_until_the_versions_change(db: str) -> None:
    run(Simulation(times, check_fails=FAILURES), ask(db))
    again = Simulation(times)
    run(again, ask(db))
    assert again.checked == []
    newer = Simulation(times, version="test-compiler 2")
    run(newer, ask(db))
    assert "sim.fast-mx4-nx2" in {slug for slug, _ in newer.checked}


def test_a_winner_that_fails_its_last_check_is_out(db: str) -> None:
    sim = Simulation(times)
    seen: Counter[str] = Counter()
    check = sim.check

    def flaky(candidate: object, library: Path | None, problem: Problem, **how: object) -> object:
        outcome = check(candidate, library, problem)  # type: ignore[arg-type]
        seen[outcome.slug] += 1
        wrong = outcome.slug == BEST and seen[BEST] == 2
        return replace(outcome, status="wrong_result", message="now") if wrong else outcome

    sim.check = flaky  # type: ignore[assignment, method-assign]
    (bucket,) = run(sim, ask(db)).buckets
    assert bucket.winner not in (None, BEST)
    assert winner(db, PROBLEMS[0]) == bucket.winner


def test_without_a_compiler_vendors_and_built_variants_are_measured(db: str) -> None:
    """T13, B10: said once, not per candidate; the exit code is not 0."""
    sim = Simulation(times, compiler=False, built={"sim.fast-mx1-nx1"})
    events: list[Event] = []
    summary = run(sim, ask(db, PROBLEMS), events.append)
    assert [e for e in events if isinstance(e, Notice)] == [Notice("no compiler in this test")]
    slugs = {r.slug for r in stored(db)}
    assert slugs == {"torch.sdpa", "torch.flash", "torch.unfused", "sim.fast-mx1-nx1"}
    assert all(r.status == "ok" for r in stored(db))
    assert (summary.exit_code, summary.toolchain) == (3, "no compiler in this test")
    again = Simulation(times, compiler=False, built={"sim.fast-mx1-nx1"})
    assert run(again, ask(db, PROBLEMS)).exit_code == 3
    assert again.timed == []
    cured = Simulation(times)
    summary = run(cured, ask(db, PROBLEMS))
    assert (summary.exit_code, summary.toolchain) == (0, "")
    assert {b.winner for b in summary.buckets} == {BEST}


def test_a_compiler_that_breaks_half_way_is_told_and_the_rest_goes_on(db: str) -> None:
    sim = Simulation(times)

    def breaks() -> None:
        sim.compiler = False  # the first batch is built by now

    sim.on_step = breaks
    events: list[Event] = []
    summary = run(sim, ask(db, PROBLEMS), events.append)
    assert [e for e in events if isinstance(e, Notice)] == [Notice("no compiler in this test")]
    assert summary.toolchain == "no compiler in this test"
    assert summary.exit_code == 3
    assert all(b.winner is not None for b in summary.buckets)
    assert {r.status for r in stored(db)} == {"ok"}


def test_all_candidates_failing_leaves_no_result_and_exit_code_1(db: str) -> None:
    broken = {v.slug: "crashed" for f in (FAST, SLOW) for v in f.legal(PROBLEMS[0], LIMITS)}
    broken |= dict.fromkeys(("torch.sdpa", "torch.flash", "torch.unfused"), "launch_error")
    summary = run(Simulation(times, check_fails=broken), ask(db))
    (bucket,) = summary.buckets
    assert (bucket.winner, bucket.speedup) == (None, None)
    assert summary.exit_code == 1
    assert not [r for r in stored(db) if r.status == "ok"]
    assert "no result" in str(summary)


def test_a_damaged_database_is_moved_aside(db: str) -> None:
    Path(db).write_bytes(b"no database " * 500)
    events: list[Event] = []
    assert run(Simulation(times), ask(db), events.append).exit_code == 0
    assert any(isinstance(e, Notice) and ".corrupt-" in e.message for e in events)
    (aside,) = Path(db).parent.glob("*.corrupt-*")
    assert aside.read_bytes().startswith(b"no database")


def test_only_the_named_families_are_measured_beside_the_vendors(db: str) -> None:
    sim = Simulation(times)
    run(sim, ask(db, families=("sim.slow",)))
    assert not [slug for slug, _ in sim.timed if slug.startswith("sim.fast")]


def test_neighbours_and_seeds_are_tried_first(db: str) -> None:
    """A bucket's winner is among the first that its neighbour's search tries."""
    large = family("sim.large", {f"p{i}": tuple(range(5)) for i in range(4)})
    candidates = registry(large)
    best = "sim.large-p0x3-p1x1-p2x2-p3x4"

    def bowl(slug: str, problem: Problem) -> float:
        if not slug.startswith("sim"):
            return 10.0
        p = candidates.candidate(slug).params
        point = (p.p0 - 3, p.p1 - 1, p.p2 - 2, p.p3 - 4)
        return 2.0 + sum(abs(x) for x in point)

    run(Simulation(bowl), ask(db, PROBLEMS[:1], trials=80, registry=candidates))
    first = winner(db, PROBLEMS[0], candidates)
    sim = Simulation(bowl)
    run(sim, ask(db, PROBLEMS[1:2], trials=4, registry=candidates))
    tried = [slug for slug, _ in sim.checked if slug.startswith("sim")]
    assert first in tried[:3]
    assert bowl(first, PROBLEMS[0]) <= bowl(best, PROBLEMS[0]) + 1


def test_where_the_time_went_is_told(db: str) -> None:
    sim = Simulation(times)
    sim.on_step = lambda: time.sleep(0.01)
    compile_all = sim.build

    def slowly(*args: Any, **how: Any) -> list[Build]:
        time.sleep(0.2)
        return [replace(build, seconds=3.0) for build in compile_all(*args, **how)]

    sim.build = slowly  # type: ignore[method-assign]
    summary = run(sim, ask(db))
    spent = dict(summary.phases)
    assert spent["checking"] >= 0.01 * len(sim.checked)
    assert spent["timing"] > 0
    assert spent["waiting for compilers"] >= 0.2
    assert sum(spent.values()) <= summary.seconds
    (line,) = [line for line in str(summary).splitlines() if line.startswith("of the time: ")]
    shares = [int(part) for part in re.findall(r"(\d+)%", line)]
    assert len(shares) == 4
    assert abs(sum(shares) - 100) <= 2
    assert "of the time" not in str(run(Simulation(times), ask(db)))
