"""Real tunes of this machine's CPU: poison, no compiler, and being stopped in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import autofa
from autofa.bench.client import WorkerOptions
from autofa.problem import Problem, parse_shape
from autofa.settings import Settings, load
from autofa.store.ranking import rank
from autofa.store.repository import Repository
from autofa.store.rows import Row
from autofa.tuning.events import Event, Notice
from autofa.tuning.hardware import open_lab
from autofa.tuning.request import TuneRequest, make_request
from autofa.tuning.session import tune

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "poison"))

from families import CASES, HONEST, REGISTRY  # noqa: E402  beside its sources


def rows_of(db: Path | str) -> list[Row]:
    with Repository.open(db, write=False) as repository:
        return repository.rows()


def test_every_poison_gets_its_status_and_none_wins(tmp_path: Path) -> None:
    """T03, T05, T06: what does not compile, lies, crashes, hangs or hoards costs only itself."""
    db = str(tmp_path / "poison.db")
    problem = parse_shape("1,2,192,16", dtype="f32", mask="causal", device="cpu")
    request = TuneRequest((problem,), "cpu", db, registry=REGISTRY, settings=load())
    options = WorkerOptions(check_timeout_s=6.0, step_timeout_s=6.0, memory_bytes=640 << 20)
    laboratory = partial(open_lab, options=options)
    summary = tune(request, laboratory=laboratory)
    found = {row.family: row for row in rows_of(db)}
    for case in CASES:
        row = found[case.family.name]
        assert (row.status, row.time_ms) == (case.status, None), row
        assert case.message in row.message
    assert found[HONEST.name].status == "ok"
    assert (summary.failed, summary.exit_code) == (len(CASES), 0)
    ranked = rank(rows_of(db), "eager", REGISTRY)
    assert {r.slug.split("-")[0] for r in ranked} == {
        "torch.sdpa",
        "torch.flash",
        "torch.unfused",
        HONEST.name,
    }

    before = rows_of(db)
    assert tune(request, laboratory=laboratory).measured == 0
    assert rows_of(db) == before, "a failure is not tried again"


def test_a_useless_compiler_is_told_once_and_vendors_are_measured(tmp_path: Path) -> None:
    """T13, B10: one line, whatever the number of candidates; the exit code is not 0."""
    settings = Settings(
        cxx=("/bin/false",), cache_dir=tmp_path / "cache", search_path=os.environ["PATH"]
    )
    db = str(tmp_path / "autofa.db")
    request = make_request(
        shapes=["1,2,64,16", "1,2,128,16"], device="cpu", db=db, settings=settings
    )
    events: list[Event] = []
    summary = tune(request, events.append)
    notices = [e.message for e in events if isinstance(e, Notice)]
    assert "/bin/false" in summary.toolchain
    assert notices == [summary.toolchain]
    assert summary.exit_code == 3
    assert summary.answered == 2
    assert {row.status for row in rows_of(db)} == {"ok"}
    assert {"torch.sdpa", "torch.flash", "torch.unfused"} <= {row.slug for row in rows_of(db)}


def test_the_public_call_measures_once(tmp_path: Path) -> None:
    db = str(tmp_path / "autofa.db")
    summary = autofa.tune(shapes=["1,2,64,16"], device="cpu", trials=1, db=db)
    (bucket,) = summary.buckets
    assert (summary.exit_code, bucket.complete) == (0, True)
    assert bucket.problem == parse_shape("1,2,64,16", dtype="f32", device="cpu")
    assert "cpu.flash" in {row.family for row in rows_of(db) if row.status == "ok"}
    assert "1 of 1 buckets" in str(summary)
    again = autofa.tune(shapes=["1,2,64,16"], device="cpu", trials=1, db=db)
    assert (again.measured, again.exit_code) == (0, 0)


SHAPES = ("1,2,32,16", "1,2,64,16", "1,2,128,16", "1,2,256,16", "1,2,32,32")


def _finished(db: Path) -> set[Problem]:
    """Problems whose precise rounds are in the database."""
    if not db.exists():
        return set()
    return {row.problem for row in rows_of(db) if row.slug == "torch.unfused"}


def _left_behind(db: Path) -> list[int]:
    """Processes that belong to a tune on this database: its name is in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(db).encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def test_a_stopped_tune_goes_on_where_it_was(tmp_path: Path) -> None:
    """T09: SIGINT, SIGTERM, SIGKILL in turn, then the same command to its end."""
    db = tmp_path / "stopped.db"
    shapes = [argument for shape in SHAPES for argument in ("--shape", shape)]
    command = [sys.executable, "-m", "autofa", "tune", "--device", "cpu", "--trials", "1", *shapes]
    environment = {**os.environ, "AUTOFA_DB": str(db)}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )

    first_rows: dict[Problem, set[str]] = {}
    for number, exit_code in (
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -signal.SIGKILL),
    ):
        before = _finished(db)
        process = start()
        deadline = time.monotonic() + 60
        while not _finished(db) - before and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert process.returncode == exit_code, said
        assert "Traceback" not in said
        for _ in range(40):
            if not _left_behind(db):
                break
            time.sleep(0.05)
        assert not _left_behind(db)
        assert len(_finished(db)) > len(before)
        for problem in _finished(db):
            first_rows.setdefault(
                problem, {r.content_hash for r in rows_of(db) if r.problem == problem}
            )

    process = start()
    _, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert len(_finished(db)) == len(SHAPES)
    for problem, hashes in first_rows.items():
        now = [row for row in rows_of(db) if row.problem == problem]
        # What was stopped between the precise rounds and the last check has one more row at most.
        assert hashes <= {row.content_hash for row in now}
        assert sum(row.slug == "torch.unfused" for row in now) == 1, "measured twice"
