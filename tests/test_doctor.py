"""`autofa doctor`: it finds what is wrong, says how to mend it, and breaks on nothing."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
from doctor_samples import CPU, diagnose, missing_winner, refuse, rows_of_cpu, sound_machine, told
from store_samples import fill

from autofa.cli import _run
from autofa.device import cpu_key
from autofa.diagnosis import checkup, compilers, measurements
from autofa.diagnosis.finding import Finding, examine, problem
from autofa.errors import StoreError, UsageError
from autofa.store import reader


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sound_machine(monkeypatch, tmp_path)


def test_nothing_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fill(tmp_path / "autofa.db", *rows_of_cpu())
    code, findings = diagnose(capsys)
    assert code == 0, findings
    assert "1 measurements, 1 of the devices here" in told(findings, "database", "ok")
    assert "1 kinds of calls answered" in told(findings, "kernels", "ok")
    assert _run(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert (out.splitlines()[-1], err) == ("nothing is wrong", "")


def test_a_gpu_that_is_not_there_is_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = diagnose(capsys)
    assert code == 0, findings
    assert "the CPU is what is tuned and used" in told(findings, "gpu", "info")


# ---- the database ----


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE autofa_alembic_version SET version_num = '9999'")


def no_view(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP VIEW autofa_dispatch")


def an_index(path: Path) -> None:
    """Damage that reading this device's rows does not come upon."""
    sound = path.read_bytes()
    for page in range(4096, len(sound), 4096):
        if sound[page] == 10:  # a leaf of an index
            path.write_bytes(sound[:page] + bytes([10]) + bytes(4095) + sound[page + 4096 :])
            with suppress(StoreError):
                if reader.read(path, CPU):
                    return
    raise AssertionError("all pages are read")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE other (x)")


DATABASES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing": (Path.unlink, "info", "not there yet -> `autofa tune` makes it"),
    "empty": (lambda path: path.write_bytes(b""), "info", "empty -> `autofa tune` fills it"),
    "noise": (lambda path: path.write_bytes(bytes(range(256)) * 16), "problem", "moves it aside"),
    "truncated": (half, "problem", "moves it aside"),
    "an index": (an_index, "problem", "moves it aside"),
    "newer": (newer, "problem", "'schema 9999'; supported: schemas up to 0001"),
    "no view": (no_view, "problem", "`autofa tune` makes it anew"),
    "directory": (directory, "problem", "name another file"),
    "pipe": (a_pipe, "problem", "name another file"),
    "foreign": (foreign, "problem", "other programs' tables"),
}


def test_a_database_that_can_never_be_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("AUTOFA_DB", str(tmp_path / "file" / "autofa.db"))
    said = told(diagnose(capsys)[1], "database", "problem")
    assert "cannot be made -> name a file in a folder that you can write" in said


@pytest.mark.parametrize("fault", list(DATABASES))
def test_databases(
    fault: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = fill(tmp_path / "data" / "autofa.db", *rows_of_cpu())
    damage, level, words = DATABASES[fault]
    monkeypatch.setenv("AUTOFA_DB", str(path))
    damage(path)
    before = {p.name: p.read_bytes() for p in path.parent.iterdir() if p.is_file()}
    findings = diagnose(capsys)[1]
    said = told(findings, "database", level)
    assert words in said
    assert str(path) in said
    assert {p.name: p.read_bytes() for p in path.parent.iterdir() if p.is_file()} == before


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_a_locked_database(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, journal: str
) -> None:
    path = fill(tmp_path / "autofa.db", *rows_of_cpu())
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute(f"PRAGMA journal_mode={journal}")
        writer.execute("PRAGMA locking_mode=EXCLUSIVE")
        writer.execute("BEGIN EXCLUSIVE")
        writer.execute("UPDATE autofa_device SET units = 1")
        started = time.monotonic()
        findings = diagnose(capsys)[1]
        assert time.monotonic() - started < 5
        assert "`fuser`" in told(findings, "database", "problem")
        writer.execute("ROLLBACK")


def test_a_server_that_does_not_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOFA_DB", "postgresql://user:secret@127.0.0.1:1/db")
    code, findings = diagnose(capsys)
    assert code == 1
    assert told(findings, "database", "problem")
    assert "secret" not in str(findings)


def test_a_database_that_can_be_read_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fill(tmp_path / "autofa.db", *rows_of_cpu())
    monkeypatch.setattr(measurements, "is_writable", lambda path: False)
    code, findings = diagnose(capsys)
    assert code == 0
    assert "can be read only" in told(findings, "database", "info")


# ---- what the rows are worth ----


def test_rows_that_all_outlived_their_kernels(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fill(tmp_path / "autofa.db", *rows_of_cpu(fingerprint="torch==1.0"))
    code, findings = diagnose(capsys)
    assert code == 1
    assert "none of its 1 measurements holds" in told(findings, "kernels", "problem")
    assert "autofa tune" in told(findings, "kernels", "problem")


def test_rows_of_other_devices_do_not_count(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fill(tmp_path / "autofa.db", *rows_of_cpu(device=cpu_key(77)))
    findings = diagnose(capsys)[1]
    assert "1 measurements, 0 of the devices here" in told(findings, "database", "ok")
    assert "nothing is measured -> `autofa tune" in told(findings, "kernels", "info")


def test_winners_without_a_library(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    variant = missing_winner(tmp_path / "autofa.db")
    code, findings = diagnose(capsys)
    assert code == 0
    said = told(findings, "kernels", "info")
    assert variant.slug in said
    assert "autofa.warmup()" in said


# ---- settings ----


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MAX_JOBS", "many", "MAX_JOBS: got 'many'"),
        ("CXX", "g++ 'open", "CXX: got"),
        ("AUTOFA_DISABLE", "1", "every call is plain SDPA -> unset AUTOFA_DISABLE"),
        ("AUTOFA_FORCE_KERNEL", "torch.flash", "every call must use torch.flash"),
        ("AUTOFA_FORCE_KERNEL", "torch.flsh", "no kernel is called 'torch.flsh'"),
    ],
)
def test_settings(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    words: str,
) -> None:
    monkeypatch.setenv(name, value)
    code, findings = diagnose(capsys)
    assert code == 1
    assert words in told(findings, "settings", "problem")


def test_what_is_set_is_shown_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOFA_DB", "postgresql://u:secret@127.0.0.1:1/db")
    monkeypatch.setenv("AUTOFA_PRECISION", "fast")
    said = told(diagnose(capsys)[1], "settings", "info")
    assert "precision=fast" in said
    assert "u:***@" in said


# ---- it breaks on nothing ----


def test_a_look_that_breaks_or_hangs_is_a_finding() -> None:
    def breaks() -> Iterator[Finding]:
        yield problem("cache", "first", "mend")
        raise ValueError("a\nb")

    def hangs() -> Iterator[Finding]:
        yield problem("cache", "first", "mend")
        time.sleep(30)

    def ours() -> Iterator[Finding]:
        raise UsageError("got this; supported: that; do so")
        yield

    first, second = examine("cache", breaks, 5)
    assert (first.found, second.found) == ("first", "looking at it failed: ValueError: a b")
    first, second = examine("cache", hangs, 0.2)
    assert (first.found, second.found) == ("first", "looking at it was given up after 0.2 s")
    (only,) = examine("cache", ours, 5)
    assert (only.found, only.cure) == ("got this; supported: that", "do so")


@pytest.mark.parametrize("name", ["database", "cache_findings", "standing", "find_ninja"])
def test_nothing_that_breaks_hides_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in (checkup, measurements, compilers):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, partial(refuse, RuntimeError("boom")))
    code, findings = diagnose(capsys)
    assert code == 1
    assert len([finding for finding in findings if "boom" in finding.found]) == 1
    areas = {"settings", "torch", "gpu", "database", "kernels", "compilers", "cache"}
    assert {finding.area for finding in findings} >= areas
