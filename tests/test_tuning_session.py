"""A whole tune on a simulated device: what is measured, stored, resumed, and when it stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tuning_simulation import DEVICE, LIMITS, Simulation, family, registry

from autofa.kernels import Registry
from autofa.problem import Problem, bucket_of, parse_shape
from autofa.store.ranking import rank
from autofa.store.repository import Repository
from autofa.store.rows import Row
from autofa.tuning.control import Interrupted, StopToken
from autofa.tuning.events import (
    BucketDone,
    BucketStarted,
    CandidateDone,
    Estimate,
    Event,
    Notice,
    Summary,
    TuneStarted,
)
from autofa.tuning.request import TuneRequest
from autofa.tuning.session import tune

FAST = family("sim.fast", {"m": (1, 2, 4), "n": (1, 2, 4, 8)}, illegal=lambda p: p.m * p.n > 16)
SLOW = family("sim.slow", {"m": (1, 2)})
REGISTRY = registry(FAST, SLOW)
PROBLEMS = tuple(
    parse_shape(f"1,8,{n},64", dtype="f32", mask=mask, device="cpu")
    for n in (128, 512, 1024)
    for mask in ("none", "causal")
)
BEST = "sim.fast-mx4-nx2"


def times(slug: str, problem: Problem) -> float:
    """`sim.fast` is 1.1x to 2x plain SDPA, best at m = 4, n = 2; all else is slower."""
    base = problem.flops * 1e-9
    if slug.startswith("sim.fast"):
        variant = REGISTRY.candidate(slug)
        return base / (2.0 - 0.2 * abs(variant.params.m - 4) - 0.1 * abs(variant.params.n - 2))
    return base * {"torch.sdpa": 1.0, "torch.flash": 1.02}.get(slug, 3.0)


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "autofa.db")


def ask(db: str, problems: tuple[Problem, ...] = PROBLEMS[:1], **options: object) -> TuneRequest:
    return replace(TuneRequest(problems, "cpu", db, trials=12, registry=REGISTRY), **options)


def run(
    sim: Simulation,
    request: TuneRequest,
    on_event: Callable[[Event], None] = lambda event: None,
    token: StopToken | None = None,
) -> Summary:
    return tune(request, on_event, token=token, laboratory=sim.laboratory)


def stored(db: str, problem: Problem | None = None) -> list[Row]:
    with Repository.open(db, write=False) as repository:
        rows = repository.rows(device=DEVICE)
    return [row for row in rows if problem is None or row.problem == problem]


def winner(db: str, problem: Problem, candidates: Registry = REGISTRY) -> str:
    rows = [row for row in stored(db) if row.bucket == bucket_of(problem)]
    return rank(rows, "eager", candidates)[0].slug


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


def test_the_budget_is_the_whole_wall_time_and_keeps_everything(db: str) -> None:
    sim = Simulation(times)
    sim.on_step = lambda: time.sleep(0.02)
    began = time.monotonic()
    summary = run(sim, ask(db, PROBLEMS, budget_s=0.5))
    assert time.monotonic() - began < 2.0
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
