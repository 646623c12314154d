"""The worker process, with candidates that fail in every way a candidate can."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from poison.families import CASES, HONEST, REGISTRY, Poison

from autofa import compiler, settings
from autofa.bench import Entrant, Outcome, Plan, Worker, WorkerOptions, memory
from autofa.bench.client import NoRoomError
from autofa.bench.memory import available_memory
from autofa.compiler import Build
from autofa.device import cpu_info, cpu_limits
from autofa.errors import LaunchError
from autofa.kernels.vendor import BASELINE, FLASH, UNFUSED
from autofa.problem import Problem

LIMITS = cpu_limits(1)
SMALL = Problem("f32", 1, 2, 2, 64, 64, 16, 16, "causal", "cpu")
OPTIONS = WorkerOptions(check_timeout_s=4.0, step_timeout_s=4.0, memory_bytes=640 << 20)
QUICK = Plan(budget_s=1.0, min_rounds=7, max_rounds=15)

pytestmark = pytest.mark.skipif(
    cpu_info().level < 3, reason="the poison families need an x86-64-v3 CPU"
)


@pytest.fixture(scope="module")
def builds(session_cache: Path) -> dict[str, Build]:
    """All poison families built, by family name."""
    requests = []
    for family in REGISTRY.families:
        variant = family.default_variant(SMALL, LIMITS)
        assert variant is not None
        requests.append((variant, variant.target(LIMITS)))
    here = replace(settings.load(), cache_dir=session_cache)
    done = compiler.build(requests, here, jobs=2)
    return {build.variant.family.name: build for build in done}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("cpu", LIMITS, OPTIONS) as shared:
        yield shared


def entrant(build: Build) -> Entrant:
    assert build.status == "ok", build.message
    return Entrant(build.variant, build.library)


def checked(worker: Worker, build: Build) -> Outcome:
    return worker.check(build.variant, build.library, SMALL)


def test_the_honest_and_the_vendors_pass(worker: Worker, builds: dict[str, Build]) -> None:
    outcome = checked(worker, builds[HONEST.name])
    assert outcome.ok, outcome.message
    assert outcome.error is not None
    assert 0 < outcome.error < 1e-5
    for vendor in (FLASH, UNFUSED):
        assert worker.check(vendor, None, SMALL).ok


# `sigfpe` passes its check: it dies in timing.
IN_CHECK = [case for case in CASES if case.family.folder not in ("broken", "sigfpe")]


@pytest.mark.parametrize("poison", IN_CHECK, ids=lambda poison: poison.family.folder)
def test_poison_gets_its_status_and_the_next_candidate_is_served(
    worker: Worker, builds: dict[str, Build], poison: Poison
) -> None:
    outcome = checked(worker, builds[poison.family.name])
    assert outcome.status == poison.status
    assert poison.message in outcome.message
    assert "\n" not in outcome.message
    assert outcome.timing is None
    assert checked(worker, builds[HONEST.name]).ok


def test_poison_that_does_not_compile_has_no_library(builds: dict[str, Build]) -> None:
    (broken,) = (case for case in CASES if case.family.folder == "broken")
    build = builds[broken.family.name]
    assert build.status == broken.status
    assert broken.message in build.message
    with (
        Worker("cpu", LIMITS, OPTIONS) as idle,
        pytest.raises(LaunchError, match="build it before"),
    ):
        idle.check(build.variant, build.library, SMALL)


def test_a_crash_in_timing_costs_only_its_own_candidate(
    worker: Worker, builds: dict[str, Build]
) -> None:
    names = [HONEST.name, "poison.sigfpe", "poison.hangs"]
    field = [entrant(builds[name]) for name in names] + [Entrant(FLASH)]
    run = worker.time(field, SMALL, QUICK)
    honest, crashed, hung, flash, baseline = run.outcomes
    assert (crashed.status, crashed.slug) == ("crashed", "poison.sigfpe-f32")
    assert "SIGFPE" in crashed.message
    assert (hung.status, hung.slug) == ("timeout", "poison.hangs-f32")
    assert baseline.slug == BASELINE
    for outcome in (honest, flash, baseline):
        assert outcome.ok, outcome.message
        assert outcome.timing is not None
        assert outcome.baseline is not None
        assert outcome.timing.samples >= 2
        assert outcome.timing.call_ms == outcome.timing.time_ms > 0
        low, high = outcome.timing.time_quantiles
        assert low <= outcome.timing.time_ms <= high
    assert baseline.timing == baseline.baseline
    assert '"threads": 1' in run.conditions


def test_slow_candidates_are_measured_as_slower(worker: Worker, builds: dict[str, Build]) -> None:
    bigger = Problem("f32", 1, 4, 4, 256, 256, 64, 64, "none", "cpu")
    run = worker.time([entrant(builds[HONEST.name]), Entrant(BASELINE_VENDOR)], bigger, QUICK)
    honest, baseline = run.outcomes
    assert honest.timing is not None
    assert honest.baseline is not None
    assert baseline.timing is not None
    assert honest.timing.time_ms > 2 * honest.baseline.time_ms


BASELINE_VENDOR = next(vendor for vendor in REGISTRY.vendors if vendor.slug == BASELINE)


def test_a_worker_that_cannot_start_says_why() -> None:
    with (
        Worker("cuda:99", cpu_limits(1), OPTIONS) as broken,
        pytest.raises(LaunchError, match=r"cuda:99 did not start: .+"),
    ):
        broken.check(FLASH, None, SMALL)


def test_the_process_is_kept_between_requests_and_restarted_after_close(
    builds: dict[str, Build],
) -> None:
    worker = Worker("cpu", LIMITS, OPTIONS)
    for _ in range(3):
        assert checked(worker, builds[HONEST.name]).ok
    assert worker.starts == 1
    worker.close()
    worker.close()
    assert checked(worker, builds[HONEST.name]).ok
    assert worker.starts == 2
    worker.close()


_PARENT = """
import sys, threading
from autofa.bench.process import Process

found = []
def start():
    found.append(Process.start("cpu", 1, 1 << 30, 60.0))
if sys.argv[1] == "thread":
    # The thread that started the worker ends long before this process does.
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
print(found[0]._child.pid, flush=True)
sys.stdin.read()
"""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("where", ["main", "thread"])
def test_the_worker_dies_with_its_parent_and_not_with_its_thread(where: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, where], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + 5
        while _alive(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _alive(pid)


def test_an_interrupted_request_does_not_poison_the_next(
    worker: Worker, builds: dict[str, Build]
) -> None:
    def interrupt() -> None:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    checked(worker, builds[HONEST.name])
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        checked(worker, builds["poison.hangs"])
    thread.join()
    assert checked(worker, builds[HONEST.name]).ok


@contextlib.contextmanager
def killing(times: int, find: Callable[[], int | None]) -> Iterator[None]:
    """Kills `times` processes in turn, as soon as `find` names one that has not been killed."""
    killed: set[int] = set()
    over = threading.Event()

    def run() -> None:
        while len(killed) < times and not over.wait(0.01):
            pid = find()
            if pid is not None and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert len(killed) == times


@pytest.mark.parametrize(("times", "status"), [(1, "timeout"), (2, "crashed")])
def test_a_worker_killed_by_hand_is_asked_once_more(
    builds: dict[str, Build], times: int, status: str
) -> None:
    def at_work() -> int | None:
        with contextlib.suppress(ValueError, AttributeError):
            process = worker._process
            return process._child.pid if process._board.read()[1] >= 0 else None
        return None

    # The candidate hangs, so that the kill meets it at work; left alone it would run out of time.
    with (
        Worker("cpu", LIMITS, replace(OPTIONS, check_timeout_s=1.0)) as worker,
        killing(times, at_work),
    ):
        outcome = checked(worker, builds["poison.hangs"])
    assert outcome.status == status
    assert ("killed by SIGKILL from outside" in outcome.message) == (times == 2)


def children() -> set[int]:
    """The worker processes of this one."""
    found = set()
    for place in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, place.read_text().split()):
            with contextlib.suppress(OSError):
                if "bench.worker" in Path(f"/proc/{pid}/cmdline").read_text():
                    found.add(pid)
    return found


@pytest.mark.parametrize("times", [1, 2])
def test_a_worker_killed_while_it_starts_is_started_once_more(
    builds: dict[str, Build], times: int
) -> None:
    killed = children()  # those of other tests, to be left alone

    def child() -> int | None:
        new = children() - killed
        killed.update(new)
        return min(new, default=None)

    with Worker("cpu", LIMITS, OPTIONS) as worker, killing(times, child):
        if times == 1:
            assert checked(worker, builds[HONEST.name]).ok
        else:
            with pytest.raises(LaunchError, match="did not start: killed by SIGKILL from outside"):
                checked(worker, builds[HONEST.name])
        assert worker.starts == 2


def test_a_kill_by_the_system_is_told_by_its_own_count(
    builds: dict[str, Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter(range(100))
    monkeypatch.setattr(memory, "oom_kills", lambda: next(counts))
    with Worker("cpu", LIMITS, OPTIONS) as worker:
        assert checked(worker, builds[HONEST.name]).ok
        assert worker._process is not None
        pid = worker._process._child.pid
        with killing(1, lambda: pid):
            outcome = checked(worker, builds["poison.hangs"])
    assert outcome.status == "out_of_memory"
    assert "want of memory" in outcome.message


def test_what_the_poll_raises_ends_the_worker_at_once(builds: dict[str, Build]) -> None:
    class Enough(Exception):
        pass

    before = children()
    with Worker("cpu", LIMITS, OPTIONS) as worker:
        assert checked(worker, builds[HONEST.name]).ok
        hung = builds["poison.hangs"]
        deadline = time.monotonic() + 0.5

        def poll() -> None:
            if time.monotonic() > deadline:
                raise Enough

        with pytest.raises(Enough):
            worker.check(hung.variant, hung.library, SMALL, poll=poll)
        assert time.monotonic() < deadline + 1
        assert children() <= before
        with pytest.raises(Enough):  # and while it starts
            worker.time([entrant(hung)], SMALL, QUICK, poll=poll)
        assert children() <= before
        assert checked(worker, builds[HONEST.name]).ok


def test_who_is_not_warm_in_time_is_left_out(worker: Worker, builds: dict[str, Build]) -> None:
    field = [entrant(builds[HONEST.name]), Entrant(FLASH)]
    run = worker.time(field, SMALL, replace(QUICK, warm_up_s=0.0))
    honest, flash, baseline = run.outcomes
    assert honest.ok
    assert flash.ok
    assert honest.timing is flash.timing is None
    assert baseline.timing is not None


def test_inputs_beyond_memory_are_no_candidates_fault(
    worker: Worker, builds: dict[str, Build]
) -> None:
    huge = replace(SMALL, seqlen_q=16_000_000, mask="none")  # 2 GB for the queries alone
    honest = builds[HONEST.name]
    with pytest.raises(NoRoomError, match=r"inputs and reference do not fit: .*allocate memory"):
        worker.check(honest.variant, honest.library, huge, thorough=False)
    with pytest.raises(NoRoomError, match=r"inputs cannot be made: .*allocate memory"):
        worker.time([entrant(honest)], huge, QUICK)
    assert checked(worker, honest).ok


def test_available_memory_is_plausible() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_memory() <= total
