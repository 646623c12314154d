"""The database file among accidents: permissions, damage, versions."""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from store_processes import without_rights
from store_samples import H200, fill, make_row

from autofa.errors import (
    StoreCorruptError,
    StoreError,
    StoreTooNewError,
    StoreUnwritableError,
)
from autofa.store import files, reader
from autofa.store.repository import Repository


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "autofa.db"


@pytest.fixture
def filled(path: Path) -> Path:
    return fill(path, make_row())


@pytest.fixture
def public(tmp_path: Path) -> Iterator[Path]:
    """A folder that other users may enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="autofa-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        for part in folder.rglob("*"):
            part.chmod(0o755)


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_reading_never_makes_a_file(path: Path) -> None:
    with Repository.open(path, write=False) as repository:
        assert repository.rows() == repository.devices() == []
    assert reader.read(path, H200) == []
    assert not path.parent.exists()
    path.parent.mkdir()
    path.touch()
    with Repository.open(path, write=False) as repository:
        assert repository.rows() == []
    assert reader.read(path, H200) == []
    assert content(path.parent) == {"autofa.db": b""}


def test_an_empty_file_is_an_empty_database(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    with Repository.open(path, write=True) as repository:
        assert repository.moved_aside is None
        assert repository.add([make_row()]) == 1


def test_a_database_without_rows_has_none(path: Path) -> None:
    Repository.open(path, write=True).close()
    assert reader.read(path, H200) == []
    with Repository.open(path, write=False) as repository:
        assert repository.rows() == repository.devices() == []


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_a_read_only_folder_can_be_read_and_says_it_cannot_be_written(
    public: Path, journal: str
) -> None:
    path = fill(public / "folder" / "autofa.db", make_row())
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal}")
    before = content(path.parent)
    assert set(before) == {"autofa.db"}
    path.chmod(0o444)
    path.parent.chmod(0o555)

    def work() -> None:
        assert reader.read(path, H200) == [make_row()]
        with Repository.open(path, write=False) as repository:
            assert repository.rows() == [make_row()]
        with pytest.raises(StoreUnwritableError, match=r"got .*folder.*; supported: .*--db"):
            Repository.open(path, write=True)

    without_rights(work)
    assert content(path.parent) == before


def test_places_that_cannot_be_written_are_found_out_at_once(public: Path) -> None:
    (public / "locked").mkdir(mode=0o555)
    (public / "secret").mkdir(mode=0o000)
    (public / "file").write_text("not a folder")
    (public / "directory.db").mkdir()
    read_only = public / "open" / "read-only.db"
    Repository.open(read_only, write=True).close()
    read_only.chmod(0o444)
    read_only.parent.chmod(0o777)

    def work() -> None:
        for path in (
            public / "locked" / "autofa.db",
            public / "locked" / "deeper" / "autofa.db",
            public / "secret" / "autofa.db",
            public / "file" / "autofa.db",
            public / "directory.db",
            read_only,
        ):
            with pytest.raises(StoreUnwritableError, match=r"database .*: got .*; supported: "):
                Repository.open(path, write=True)

    without_rights(work)


def test_what_may_not_be_read_says_so(public: Path) -> None:
    path = public / "autofa.db"
    Repository.open(path, write=True).close()
    path.chmod(0)
    (public / "secret").mkdir(mode=0o000)

    def work() -> None:
        for place in (path, public / "secret" / "autofa.db"):
            with pytest.raises(StoreError, match=r"check (its|the file's) permissions"):
                reader.read(place, H200)

    without_rights(work)


def test_a_directory_in_its_place_cannot_be_read(tmp_path: Path) -> None:
    for read in (
        lambda: reader.read(tmp_path, H200),
        lambda: Repository.open(tmp_path, write=False),
    ):
        with pytest.raises(StoreError, match="a directory"):
            read()


def random_bytes(path: Path) -> None:
    path.write_bytes(bytes(range(7, 256)) * 40)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwritten(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(bytes(data))


def no_revision(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM autofa_alembic_version")


def a_table_lost(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE autofa_provenance")


DAMAGES = [random_bytes, cut_in_half, overwritten, no_revision, a_table_lost]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_reported_and_left_alone(
    filled: Path, damage: Callable[[Path], None]
) -> None:
    damage(filled)
    before = filled.read_bytes()
    for open_it in (
        lambda: Repository.open(filled, write=False),
        lambda: Repository.open(filled, write=True),
    ):
        with pytest.raises(StoreCorruptError, match=r"database .*; supported: an intact SQLite"):
            open_it()
    if damage is not no_revision:  # its view still answers, less a revision
        with pytest.raises(StoreCorruptError):
            reader.read(filled, H200)
    assert filled.read_bytes() == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_moved_aside_and_never_deleted(
    filled: Path, damage: Callable[[Path], None]
) -> None:
    damage(filled)
    before = filled.read_bytes()
    wal = filled.with_name("autofa.db-wal")
    wal.write_bytes(b"left by a crash")
    with Repository.open(filled, write=True, recover=True) as repository:
        aside = repository.moved_aside
        assert repository.rows() == []
        assert repository.add([make_row()]) == 1
    assert aside is not None
    assert aside.name.startswith("autofa.db.corrupt-2")
    assert aside.read_bytes() == before
    assert reader.read(filled, H200) == [make_row()]


def test_a_sound_file_is_never_moved(filled: Path) -> None:
    assert files.move_aside(filled, 1.0) is None
    with Repository.open(filled, write=True, recover=True) as repository:
        assert repository.moved_aside is None
        assert repository.rows() == [make_row()]


@pytest.mark.parametrize("revision", ["0002", "9999", "from the future"])
def test_a_newer_file_is_neither_read_nor_written(filled: Path, revision: str) -> None:
    with closing(sqlite3.connect(filled)) as connection, connection:
        connection.execute("UPDATE autofa_alembic_version SET version_num = ?", (revision,))
        connection.execute("ALTER TABLE autofa_measurement ADD COLUMN future TEXT")
    before = filled.read_bytes()
    for open_it in (
        lambda: reader.read(filled, H200),
        lambda: Repository.open(filled, write=False),
        lambda: Repository.open(filled, write=True),
        lambda: Repository.open(filled, write=True, recover=True),
    ):
        with pytest.raises(StoreTooNewError) as raised:
            open_it()
        for part in (str(filled), f"schema {revision}", "schemas up to 0001", "--db"):
            assert part in str(raised.value)
    assert filled.read_bytes() == before
    assert not list(filled.parent.glob("*.corrupt-*"))


def test_a_newer_file_whose_view_has_changed_is_too_new(filled: Path) -> None:
    with closing(sqlite3.connect(filled)) as connection, connection:
        connection.execute("UPDATE autofa_alembic_version SET version_num = '0002'")
        connection.execute("DROP VIEW autofa_dispatch")
    with pytest.raises(StoreTooNewError):
        reader.read(filled, H200)


def test_a_lost_view_is_told_and_made_anew(filled: Path) -> None:
    def view() -> str:
        query = "SELECT sql FROM sqlite_master WHERE name = 'autofa_dispatch'"
        with closing(sqlite3.connect(filled)) as connection:
            return str(connection.execute(query).fetchone()[0])

    before = view()
    with closing(sqlite3.connect(filled)) as connection, connection:
        connection.execute("DROP VIEW autofa_dispatch")
    with pytest.raises(StoreError, match=r"no view autofa_dispatch.*`autofa tune` makes it anew"):
        reader.read(filled, H200)
    with Repository.open(filled, write=False) as repository:
        assert repository.rows() == [make_row()]
    Repository.open(filled, write=True).close()
    assert view() == before
    assert reader.read(filled, H200) == [make_row()]
    assert {p.name for p in filled.parent.iterdir()} <= {
        "autofa.db", "autofa.db-wal", "autofa.db-shm",
    }  # fmt: skip


def hold_giants(path: Path, column: str) -> list[str]:
    """Writes 100 MB into two rows of 61; gives the kernels of the others."""
    names = ["torch.sdpa", *(f"test.kernel-{i}" for i in range(60))]
    fill(path, *map(make_row, names))
    with closing(sqlite3.connect(path)) as connection, connection:
        for name in (names[1], names[40]):
            connection.execute(
                f"UPDATE autofa_measurement SET {column} = ? WHERE slug = ?", ("x" * 10**8, name)
            )
            names.remove(name)
    return names


@pytest.mark.parametrize("column", ["message", "problem"])
def test_texts_of_100_mb_do_not_slow_a_first_call(filled: Path, column: str) -> None:
    names = hold_giants(filled, column)
    started = time.process_time()
    found = reader.read(filled, H200)
    cost = time.process_time() - started
    assert [row.slug for row in found] == names
    if sys.version_info >= (3, 11):  # read whole, each costs 0.3 s
        assert cost < 0.25


@pytest.mark.skipif(sys.version_info < (3, 11), reason="sqlite3 has no limits")
def test_a_text_of_100_mb_that_the_view_compares_is_told_at_once(filled: Path) -> None:
    hold_giants(filled, "status")
    started = time.process_time()
    with pytest.raises(StoreError, match="`autofa db export` keeps what is sound"):
        reader.read(filled, H200)
    assert time.process_time() - started < 0.25
    with Repository.open(filled, write=False) as repository:
        assert len(repository.audit().rows) == 59


def test_a_view_without_end_does_not_hang_a_first_call(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(sqlite3.connect(filled)) as connection, connection:
        connection.execute("DROP VIEW autofa_dispatch")
        connection.execute(
            "CREATE VIEW autofa_dispatch AS WITH RECURSIVE n(i) AS"
            " (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT m.*, n.i FROM n"
            " JOIN autofa_measurement m ON n.i < 0"
        )
    monkeypatch.setattr(reader, "_MOST_SECONDS", 0.2)
    started = time.monotonic()
    with pytest.raises(StoreError):
        reader.read(filled, H200)
    assert time.monotonic() - started < 3


def test_a_trigger_in_a_file_is_never_run(filled: Path) -> None:
    with closing(sqlite3.connect(filled)) as connection, connection:
        connection.execute(
            "CREATE TRIGGER evil AFTER INSERT ON autofa_measurement"
            " BEGIN DELETE FROM autofa_measurement; END"
        )
    for write in (True, False):
        with pytest.raises(StoreError, match="a trigger on autofa_measurement: 'evil'"):
            Repository.open(filled, write=write, recover=write)
    assert reader.read(filled, H200) == [make_row()]


def test_a_view_in_the_place_of_a_table_is_no_database(filled: Path) -> None:
    with closing(sqlite3.connect(filled)) as connection, connection:
        connection.execute("ALTER TABLE autofa_provenance RENAME TO other")
        connection.execute(
            "CREATE VIEW autofa_provenance AS WITH RECURSIVE n(id) AS"
            " (SELECT 1 UNION ALL SELECT id + 1 FROM n) SELECT id, '' document, '' digest FROM n"
        )
    for write in (True, False):
        with pytest.raises(StoreCorruptError, match="no table autofa_provenance"):
            Repository.open(filled, write=write)
