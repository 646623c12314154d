"""A tune on several devices at once: who does what, who dies, what is kept; simulated devices."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from fanout_member import KEYS, OTHER
from tuning_simulation import DEVICE
from tuning_world import BEST, PROBLEMS, ask

from autofa.cli import _run
from autofa.device import DeviceKey
from autofa.errors import DeviceError
from autofa.problem import Problem
from autofa.store.repository import Repository
from autofa.store.rows import Row
from autofa.tuning import fanout
from autofa.tuning.claims import FileClaims
from autofa.tuning.events import BucketDone, BucketStarted, Event, Notice
from autofa.tuning.fanout import FanoutSummary, Member, fan_out

HERE = Path(__file__).resolve().parent
COMMAND = (sys.executable, str(HERE / "fanout_member.py"))
LIKE = ("cuda:0", "cuda:1")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent))


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "autofa.db")


class Run:
    """One fan-out and what was said meanwhile."""

    def __init__(
        self,
        db: str,
        devices: tuple[str, ...],
        on_event: Callable[[Event], None] = lambda event: None,
        **options: object,
    ) -> None:
        self.events: list[tuple[str, Event]] = []

        def note(member: Member, event: Event) -> None:
            self.events.append((member.device, event))
            on_event(event)

        members = [Member(device, KEYS[device]) for device in devices]
        request = ask(db, PROBLEMS, **options)
        self.summary: FanoutSummary = fan_out(request, members, note, COMMAND)

    def done(self, device: str) -> list[Problem]:
        return [
            event.result.problem
            for who, event in self.events
            if who == device and isinstance(event, BucketDone)
        ]

    def notices(self, device: str) -> list[str]:
        return [e.message for who, e in self.events if who == device and isinstance(e, Notice)]


def stored(db: str, device: DeviceKey) -> list[Row]:
    with Repository.open(db, write=False) as repository:
        return list(repository.rows(device=device))


def defaults(db: str, device: DeviceKey) -> list[int]:
    """How often each problem was searched: a search measures this default once."""
    counts = Counter(row.problem for row in stored(db, device) if row.slug == "sim.slow-mx1")
    return [counts[problem] for problem in PROBLEMS]


def test_like_devices_share_the_buckets_and_another_has_its_own(db: str) -> None:
    run = Run(db, ("cuda:0", "cuda:1", "cuda:2"))
    shared = run.done("cuda:0") + run.done("cuda:1")
    assert sorted(map(repr, shared)) == sorted(map(repr, PROBLEMS))
    assert run.done("cuda:0")
    assert run.done("cuda:1")
    assert sorted(map(repr, run.done("cuda:2"))) == sorted(map(repr, PROBLEMS))
    assert not run.notices("cuda:2"), "nothing that it measures is another's"
    for device in (DEVICE, OTHER):
        assert defaults(db, device) == [1] * len(PROBLEMS)
    assert run.summary.exit_code == 0
    assert run.summary.losses == ()
    assert [kind.device for kind in run.summary.kinds] == [DEVICE, OTHER]
    for kind in run.summary.kinds:
        assert [bucket.winner for bucket in kind.buckets] == [BEST] * len(PROBLEMS)
        found = {(row.problem, row.slug) for row in stored(db, kind.device)}
        assert kind.measured == len(found)


_CLAIM = """
import sys
from autofa.tuning.claims import FileClaims
from tuning_world import PROBLEMS
from fanout_member import KEYS
print([FileClaims(sys.argv[1], KEYS[device]).take(PROBLEMS[0]) for device in ("cuda:1", "cuda:2")])
"""


def test_a_claim_is_of_one_kind_of_device(db: str) -> None:
    with FileClaims(db, DEVICE) as claims:
        assert claims.take(PROBLEMS[0])
        paths = os.pathsep.join((str(HERE), str(HERE.parent)))
        other = subprocess.run(
            [sys.executable, "-c", _CLAIM, db],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
    assert other.stdout == "[False, True]\n", other.stderr


@pytest.mark.slow
def test_a_second_tune_measures_nothing(db: str) -> None:
    run = Run(db, LIKE)
    again = Run(db, LIKE)
    assert not [e for _, e in again.events if isinstance(e, BucketStarted)]
    assert again.summary.kinds[0].measured == 0
    assert again.summary.kinds[0].reused == run.summary.kinds[0].measured


@pytest.mark.slow
def test_force_measures_every_bucket_again_and_once(db: str) -> None:
    Run(db, LIKE)
    Run(db, LIKE, force=True)
    assert defaults(db, DEVICE) == [2] * len(PROBLEMS)


def test_the_others_do_the_share_of_one_that_is_killed(
    db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANOUT_MISHAP", "cuda:1 dies")
    run = Run(db, LIKE)
    assert len(run.done("cuda:1")) == 1
    assert len(run.done("cuda:0")) == len(PROBLEMS) - 1
    assert [bucket.winner for bucket in run.summary.kinds[0].buckets] == [BEST] * len(PROBLEMS)
    assert run.summary.exit_code == 0
    assert run.summary.losses == (
        "cuda:1: its process was ended by SIGKILL; the others did its share",
    )
    assert run.notices("cuda:1")[-1] == "its process was ended by SIGKILL"
    assert run.summary.losses[0] in run.summary.text({})


@pytest.mark.parametrize(
    ("mishap", "reason"),
    [
        ("fails", "this device has gone"),
        pytest.param("exits", "status 1: the driver is another one", marks=pytest.mark.slow),
    ],
)
def test_what_only_one_device_could_have_done_is_left(
    db: str, monkeypatch: pytest.MonkeyPatch, mishap: str, reason: str
) -> None:
    monkeypatch.setenv("FANOUT_MISHAP", f"cuda:2 {mishap}")
    run = Run(db, ("cuda:0", "cuda:2"))
    assert run.summary.exit_code == 3
    assert [kind.answered for kind in run.summary.kinds] == [len(PROBLEMS), 0]
    (loss,) = run.summary.losses
    assert reason in loss
    assert loss.endswith("run the same command again to go on")


@pytest.mark.slow
def test_a_failure_of_all_is_an_error(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANOUT_MISHAP", "cuda:0 fails")
    with pytest.raises(DeviceError, match="has gone"):
        Run(db, ("cuda:0",))


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_all_and_keeps_what_is_done(
    db: str, number: signal.Signals, code: int
) -> None:
    before = signal.getsignal(number)

    def interrupt(event: Event) -> None:
        if isinstance(event, BucketDone) and event.result.complete:
            os.kill(os.getpid(), number)

    began = time.monotonic()
    run = Run(db, LIKE, interrupt)
    assert time.monotonic() - began < 20
    assert run.summary.exit_code == code
    assert run.summary.text({}).endswith("interrupted; run the same command again to go on")
    assert run.summary.losses[:-1] == ()
    assert 0 < len({row.problem for row in stored(db, DEVICE)}) < len(PROBLEMS)
    assert signal.getsignal(number) is before
    assert Run(db, LIKE).summary.exit_code == 0
    assert defaults(db, DEVICE) == [1] * len(PROBLEMS)


@pytest.mark.slow
def test_a_budget_is_the_wall_time_of_the_whole(db: str) -> None:
    began = time.monotonic()
    run = Run(db, LIKE, budget_s=0.5)
    assert time.monotonic() - began < 15
    assert run.summary.kinds[0].budget_spent
    assert "the budget was spent" in run.summary.text({})


def command(monkeypatch: pytest.MonkeyPatch, db: str, devices: tuple[str, ...]) -> int:
    """`autofa tune --device all` where these devices are; its exit code."""
    module = importlib.import_module("autofa.cli.tune")
    members = tuple(Member(device, KEYS[device]) for device in devices)
    monkeypatch.setattr(fanout, "gpus", lambda: members)
    monkeypatch.setattr(fanout, "fan_out", partial(fan_out, command=COMMAND))
    monkeypatch.setattr(module, "make_request", lambda *args, **more: ask(db, PROBLEMS[:2]))
    return _run(["tune", "--device", "all"])


def test_the_command_prints_all_devices_lines_and_one_summary(
    db: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, db, ("cuda:0", "cuda:2")) == 0
    said = capsys.readouterr()
    lines = said.err.splitlines()
    for device in ("cuda:0", "cuda:2"):
        own = [line for line in lines if line.startswith(f"{device}: ")]
        assert sum(BEST in line for line in own) == 2
    assert said.out.count("2 of 2 buckets tuned in") == 2
    assert "`autofa report` shows the leaderboard" in lines


def test_one_gpu_is_tuned_as_by_its_name(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("autofa.cli.tune")
    asked: list[str] = []
    monkeypatch.setattr(module, "_tune", lambda request: asked.append(request.device) or 0)
    assert command(monkeypatch, db, ("cuda:0",)) == 0
    assert asked == ["cuda:0"]


@pytest.mark.parametrize(("jobs", "count", "each"), [(8, 2, 4), (5, 2, 2), (1, 4, 1)])
def test_compilers_are_divided_among_the_processes(jobs: int, count: int, each: int) -> None:
    assert fanout._jobs_each(ask("", jobs=jobs), count) == each


def test_all_without_a_gpu_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fanout.devices, "cuda_problem", lambda: "no NVIDIA GPU is visible")
    assert _run(["tune", "--device", "all"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "no NVIDIA GPU is visible" in said[0]
