"""The database file among other processes: locks, races, writers that are killed, a full disk."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from store_processes import PROCESSES, in_processes
from store_samples import H200, fill, make_row

from autofa.errors import StoreLockedError
from autofa.store import reader
from autofa.store.repository import Repository


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "autofa.db"


@pytest.fixture
def filled(path: Path) -> Path:
    return fill(path, make_row())


def test_many_processes_may_create_the_database(tmp_path: Path) -> None:
    for attempt in range(3):
        path = tmp_path / f"round {attempt}" / "autofa.db"

        def work(number: int, path: Path = path) -> None:
            with Repository.open(path, write=True) as repository:
                repository.add([make_row("torch.sdpa"), make_row(f"test.kernel-{number}")])

        assert in_processes(8, work) == []
        assert len(reader.read(path, H200)) == 9


def test_threads_may_create_and_share_a_database(path: Path) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with Repository.open(path, write=True) as repository:
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
    assert len(reader.read(path, H200)) == 6


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
