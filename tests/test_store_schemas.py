"""Databases of every schema there ever was, and of one to come: brought up to date, or as before.

tests/schemas/<revision>.sql is a database of that revision, <revision>.jsonl what it must export.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from store_places import Databases, execute, install, is_file, read, stored, tables
from store_processes import in_processes
from store_samples import CPU, H200, make_row

from autofa.errors import StoreUnwritableError
from autofa.resources import db_dir
from autofa.store import columns, migrate
from autofa.store.columns import VERSION_TABLE
from autofa.store.exchange import export_lines
from autofa.store.repository import Repository

SCHEMAS = Path(__file__).parent / "schemas"
REVISIONS = sorted(
    script.revision for script in ScriptDirectory(str(db_dir() / "migrations")).walk_revisions()
)
NEXT = f"{int(columns.SCHEMA) + 1:04}"
STEP = "op.execute('CREATE TABLE autofa_next (id INTEGER)')"


def database(location: str, revision: str) -> str:
    if is_file(location):
        Path(location).parent.mkdir(parents=True, exist_ok=True)
    install(location, SCHEMAS / f"{revision}.sql", revision)
    return location


def exported(location: str, *, write: bool = False) -> str:
    Repository.open(location, write=write).close()
    return "".join(export_lines(stored(location)))


def expected(revision: str) -> str:
    return (SCHEMAS / f"{revision}.jsonl").read_text(encoding="ascii")


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return sorted(connection.iterdump())


def whole(location: str) -> object:
    """All that a migration could change."""
    if is_file(location):
        return dump(Path(location))
    return tables(location), exported(location), execute(location, f"TABLE {VERSION_TABLE}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "autofa.db"


@pytest.fixture
def upcoming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The next migration, which a test may write anew."""
    folder = tmp_path / "migrations"
    (folder / "versions").mkdir(parents=True)
    shipped = db_dir() / "migrations"
    for source in (shipped / "env.py", *shipped.glob("versions/*.py")):
        (folder / source.relative_to(shipped)).write_text(source.read_text())
    for module in (columns, migrate):
        monkeypatch.setattr(module, "SCHEMA", NEXT)
    monkeypatch.setattr("autofa.store.repository.SCHEMA", NEXT)
    monkeypatch.setattr(migrate, "db_dir", lambda: tmp_path)
    return write_step(folder / "versions" / f"{NEXT}_next.py", STEP)


def write_step(file: Path, body: str) -> Path:
    file.write_text(
        f"from alembic import op\nrevision = '{NEXT}'\ndown_revision = '{REVISIONS[-1]}'\n"
        f"def upgrade():\n    {body}\n"
    )
    return file


def test_every_schema_has_its_fixture() -> None:
    assert sorted(file.stem for file in SCHEMAS.glob("*.sql")) == REVISIONS


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_database_of_every_schema_keeps_every_row(databases: Databases, revision: str) -> None:
    location = database(databases(), revision)
    assert exported(location, write=True) == expected(revision)
    fresh = databases()
    Repository.open(fresh, write=True).close()
    assert tables(location) == tables(fresh)
    with Repository.open(location, write=False) as repository:
        for device in (H200, CPU):
            assert read(location, device) == repository.rows(device, ok_only=True) != []
    with Repository.open(location, write=True) as repository:
        assert repository.add([make_row("test.new")]) == 1


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_schema_to_come_is_reached_from_every_one(
    location: str, upcoming: Path, revision: str
) -> None:
    database(location, revision)
    before = whole(location)
    assert exported(location, write=True) == expected(revision)
    assert execute(location, "SELECT count(*) FROM autofa_next") == [(0,)]
    if is_file(location):  # a server's owner has backups
        (copy,) = Path(location).parent.glob(f"autofa.db.{revision}-*Z")
        assert dump(copy) == before


def test_a_migration_that_fails_changes_nothing(location: str, upcoming: Path) -> None:
    database(location, REVISIONS[-1])
    before = whole(location)
    write_step(upcoming, f"{STEP}; op.execute('DELETE FROM autofa_measurement'); 1 / 0")
    with pytest.raises(ZeroDivisionError):
        Repository.open(location, write=True)
    assert whole(location) == before
    write_step(upcoming, STEP)
    assert exported(location, write=True) == expected(REVISIONS[-1])


def test_a_migration_without_room_for_its_copy_does_not_begin(
    path: Path, upcoming: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database(str(path), REVISIONS[-1])
    before = dump(path)
    connect = sqlite3.connect

    def full(place: Path, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(place, **options)
        if ".db." in str(place):
            connection.execute("PRAGMA max_page_count = 3")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", full)
        with pytest.raises(StoreUnwritableError, match="full"):
            Repository.open(path, write=True)
    assert dump(path) == before
    assert not list(path.parent.glob("autofa.db.*-*Z"))


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("processes", [2, 8])
def test_many_processes_migrate_once(
    location: str, upcoming: Path, revision: str, processes: int
) -> None:
    database(location, revision)
    # A second creation of the table would raise.
    write_step(upcoming, f"{STEP}; op.execute('SELECT count(*) FROM autofa_measurement')")

    def work(number: int) -> None:
        with Repository.open(location, write=True) as repository:
            repository.add([make_row(f"test.kernel-{number}")])

    assert in_processes(processes, work) == []
    assert len(exported(location).splitlines()) == len(expected(revision).splitlines()) + processes
    assert execute(location, f"SELECT version_num FROM {VERSION_TABLE}") == [(NEXT,)]
    if is_file(location):
        assert len(list(Path(location).parent.glob("autofa.db.*-*Z"))) == 1
