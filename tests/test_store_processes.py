"""The database file among other processes: locks, races, writers that are killed, a full disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import datetime
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
from store_places import Databases, is_file, read, stored
from store_processes import PROCESSES, in_processes
from store_samples import H200, at, failed, fill, make_row

from autofa.cli import _run
from autofa.errors import StoreError, StoreLockedError, StoreUnwritableError
from autofa.store import exchange, files, migrate, reader
from autofa.store.repository import Repository


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "autofa.db"


@pytest.fixture
def filled(path: Path) -> Path:
    return fill(path, make_row())


def test_many_processes_may_create_the_database(databases: Databases) -> None:
    for _ in range(10 if is_file(first := databases()) else 2):
        location = databases()

        def work(number: int, location: str = location) -> None:
            with Repository.open(location, write=True) as repository:
                # In another order each, as tunes of the same shapes are.
                rows = [make_row("torch.sdpa"), make_row(f"test.kernel-{number}")]
                assert 1 <= repository.add(rows[:: 1 - 2 * (number % 2)]) <= 2

        assert in_processes(8, work) == []
        assert len(read(location, H200)) == len(stored(location)) == 9
    assert read(first, H200) == []


def test_threads_may_create_and_share_a_database(location: str) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with Repository.open(location, write=True) as repository:
                repository.add([make_row(f"test.kernel-{number}")])
                assert make_row(f"test.kernel-{number}") in repository.rows()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(read(location, H200)) == 6


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_readers_do_not_wait_for_a_writer(filled: Path, journal: str) -> None:
    with closing(sqlite3.connect(filled, isolation_level=None)) as writer:
        assert writer.execute(f"PRAGMA journal_mode = {journal}").fetchone() == (journal,)
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE autofa_device SET units = 1")
        start = time.monotonic()
        assert reader.read(filled, H200) == [make_row()]
        with Repository.open(filled, write=False) as repository:
            assert repository.rows() == [make_row()]
        # So is opening for writing: a tune that finds everything measured needs no lock.
        with Repository.open(filled, write=True) as repository:
            assert repository.rows() == [make_row()]
        assert time.monotonic() - start < 1
        writer.execute("ROLLBACK")


def test_a_writer_waits_and_then_says_so(filled: Path) -> None:
    with closing(sqlite3.connect(filled, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        with (
            Repository.open(filled, write=True, timeout=0.1) as repository,
            pytest.raises(StoreLockedError, match="lock held by another'; supported: a database"),
        ):
            repository.add([make_row("torch.flash")])
        release = threading.Timer(0.2, lambda: other.execute("ROLLBACK"))
        release.start()
        with Repository.open(filled, write=True, timeout=20) as repository:
            assert repository.add([make_row("torch.flash")]) == 1
        release.join()


def test_many_processes_move_a_damaged_file_aside_once(filled: Path) -> None:
    filled.write_bytes(bytes(range(7, 256)) * 40)

    def work(number: int) -> None:
        with Repository.open(filled, write=True, recover=True) as repository:
            repository.add([make_row(f"test.kernel-{number}")])

    assert in_processes(6, work) == []
    assert len(reader.read(filled, H200)) == 6
    assert len(list(filled.parent.glob("*.corrupt-*Z"))) == 1


def test_a_crashed_writers_journal_is_rolled_back(filled: Path) -> None:
    with closing(sqlite3.connect(filled, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")

    def die(number: int) -> None:
        connection = sqlite3.connect(filled, isolation_level=None)
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("PRAGMA cache_spill = 1")
        for size in range(200):
            connection.execute(
                "INSERT INTO autofa_provenance VALUES (NULL, ?, ?)",
                (str(size), "x" * 5000),
            )
        os.kill(os.getpid(), 9)

    child = PROCESSES.Process(target=die, args=(0,))
    child.start()
    child.join(30)
    assert child.exitcode == -9
    assert filled.with_name("autofa.db-journal").exists()
    with Repository.open(filled, write=True) as repository:
        assert repository.rows() == [make_row()]
        assert repository.add([make_row("torch.flash")]) == 1


def test_a_tuner_in_every_process_loses_nothing(location: str) -> None:
    turns = 10 if is_file(location) else 4

    def work(number: int) -> None:
        for turn in range(turns):
            mine = [make_row(f"test.kernel-{number}", run=f"{turn}.{i}") for i in range(3)]
            shared = make_row("torch.sdpa", run=f"{turn}")
            with Repository.open(location, write=True) as repository:
                assert 3 <= repository.add([*mine, shared]) <= 4
                assert set(mine) <= set(repository.rows())
            assert {*mine, shared} <= set(read(location, H200))

    assert in_processes(8, work) == []
    assert len(read(location, H200)) == 8 * turns * 3 + turns
    assert _run(["db", "check", "--db", location]) == 0


def end(child: ForkProcess, after: float) -> None:
    """Kills a process that many seconds later, unless it is done."""
    child.join(after)
    child.kill()
    child.join(30)
    assert child.exitcode in (0, -signal.SIGKILL)


def test_a_writer_killed_at_any_moment_loses_and_doubles_nothing(location: str) -> None:
    batch = 5
    draw = random.Random(0)
    sent: list[str] = []

    def write(life: int, done: Connection) -> None:
        with Repository.open(location, write=True) as repository:
            for turn in range(10**6):
                run = f"{life}.{turn}"
                repository.add([make_row(f"test.kernel-{i}", run=run) for i in range(batch)])
                done.send(run)

    for life in range(30 if is_file(location) else 10):
        ours, theirs = PROCESSES.Pipe(duplex=False)
        child = PROCESSES.Process(target=write, args=(life, theirs))
        child.start()
        theirs.close()
        if life % 2:  # of the others some are killed while they open the database
            assert ours.poll(30)
        end(child, draw.uniform(0.0, 0.12))
        try:
            while ours.poll():
                sent.append(ours.recv())
        except EOFError:
            pass
        found: dict[str, int] = {}
        for row in read(location, H200):
            found[row.run] = found.get(row.run, 0) + 1
        assert set(found.values()) <= {batch}, "half a batch, or one twice"
        assert set(sent) <= set(found), "a batch was lost that had been stored"
    assert len(sent) > 20
    assert _run(["db", "check", "--db", location]) == 0


def test_an_import_killed_at_any_moment_stored_all_or_nothing(tmp_path: Path) -> None:
    rows = [make_row(f"test.kernel-{i}") for i in range(300)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(exchange.export_lines(rows)))
    draw = random.Random(0)
    outcomes = set()
    for life in range(12):
        path = fill(tmp_path / f"{life}.db", make_row("torch.flash"))
        arguments = ["db", "import", str(file), "--db", str(path)]
        child = PROCESSES.Process(target=_run, args=(arguments,))
        child.start()
        end(child, draw.uniform(0.02, 0.25))
        found = reader.read(path, H200)
        assert make_row("torch.flash") in found
        outcomes.add(len(found))
    assert outcomes <= {1, 301}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of half a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if os.getuid() != 0 or mount is None:
        pytest.skip("needs root, to mount a small disk")
    made = [mount, "-t", "tmpfs", "-o", "size=512k", "none", str(place)]
    if subprocess.run(made, capture_output=True, check=False).returncode != 0:
        pytest.skip("this system lets nobody mount a small disk")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_and_costs_nothing_stored(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fill(small_disk / "autofa.db", make_row())
    many = [make_row(f"test.kernel-{i}") for i in range(1500)]
    file = tmp_path / "many.jsonl"
    file.write_text("".join(exchange.export_lines(many)))
    with (
        Repository.open(path, write=True) as repository,
        pytest.raises(StoreUnwritableError, match="free the disk"),
    ):
        repository.add(many)
    assert _run(["db", "import", str(file), "--db", str(path)]) == 1
    assert "free the disk" in capsys.readouterr().err
    large = fill(tmp_path / "large.db", *many)
    target = small_disk / "export.jsonl"
    assert _run(["db", "export", str(target), "--db", str(large)]) == 1
    assert "No space left" in capsys.readouterr().err
    assert {p.name for p in small_disk.iterdir()} <= {"autofa.db", "autofa.db-wal", "autofa.db-shm"}
    assert reader.read(path, H200) == [make_row()]
    with Repository.open(path, write=True) as repository:
        assert repository.add([make_row("torch.flash")]) == 1
    with pytest.raises(StoreError):
        fill(small_disk / "other.db", *many)
    (small_disk / "other.db").unlink(missing_ok=True)
    with suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as ballast:
        for _ in range(512):
            ballast.write(bytes(1024))
    kept = [make_row(), make_row("torch.flash")]
    assert reader.read(path, H200) == kept, "not one byte is free"
    capsys.readouterr()
    assert _run(["db", "import", str(file), "--db", str(path)]) == 1
    assert "disk" in capsys.readouterr().err
    (small_disk / "ballast").unlink()
    assert _run(["db", "check", "--db", str(path)]) == 0


def test_a_clock_that_jumped_back_loses_nothing(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(datetime):
        @classmethod
        def now(cls, tz: object = None) -> Stopped:
            return cls(2020, 1, 1)

    monkeypatch.setattr(migrate, "datetime", Stopped)
    with Repository.open(filled, write=True) as repository:
        earlier = [make_row(run="later, by the clock earlier", provenance=at(0)), failed("torch.x")]
        assert repository.add(earlier) == 2
        assert len(repository.rows()) == 3
    damages = [b"first" * 200, b"second" * 200]
    for damage in damages:
        filled.write_bytes(damage)
        assert files.move_aside(filled, 1.0) is not None
    kept = sorted(filled.parent.glob("*.corrupt-2020*"))
    assert {*damages} <= {file.read_bytes() for file in kept}
    fill(filled, make_row())
    copies = {migrate.back_up(filled, "0001") for _ in range(3)}
    assert len(copies) == 3
    assert all(reader.read(copy, H200) == [make_row()] for copy in copies)
