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
from store_processes import in_processes
from store_samples import CPU, H200, make_row

from autofa.errors import StoreUnwritableError
from autofa.resources import db_dir
from autofa.store import columns, migrate, reader
from autofa.store.exchange import export_lines
from autofa.store.repository import Repository

SCHEMAS = Path(__file__).parent / "schemas"
REVISIONS = sorted(
    script.revision for script in ScriptDirectory(str(db_dir() / "migrations")).walk_revisions()
)
NEXT = f"{int(columns.SCHEMA) + 1:04}"
STEP = "op.execute('CREATE TABLE autofa_next (id INTEGER)')"


def database(path: Path, revision: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((SCHEMAS / f"{revision}.sql").read_text(encoding="utf-8"))
    return path


def exported(path: Path, *, write: bool = False) -> str:
    with Repository.open(path, write=write) as repository:
        found = repository.audit()
    assert found.damaged == ()
    return "".join(export_lines(found.rows))


def expected(revision: str) -> str:
    return (SCHEMAS / f"{revision}.jsonl").read_text(encoding="ascii")


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return sorted(connection.iterdump())


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
def test_a_database_of_every_schema_keeps_every_row(path: Path, revision: str) -> None:
    database(path, revision)
    assert exported(path, write=True) == expected(revision)
    fresh = path.with_name("fresh.db")
    Repository.open(fresh, write=True).close()
    shape = "SELECT type, name, tbl_name FROM sqlite_master ORDER BY 1, 2"
    with closing(sqlite3.connect(path)) as old, closing(sqlite3.connect(fresh)) as new:
        assert old.execute(shape).fetchall() == new.execute(shape).fetchall()
    with Repository.open(path, write=False) as repository:
        for device in (H200, CPU):
            usable = reader.read(path, device)
            assert usable == repository.rows(device, ok_only=True) != []


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_schema_to_come_is_reached_from_every_one(
    path: Path, upcoming: Path, revision: str
) -> None:
    database(path, revision)
    before = dump(path)
    assert exported(path, write=True) == expected(revision)
    (copy,) = path.parent.glob(f"autofa.db.{revision}-*Z")
    assert dump(copy) == before
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM autofa_next").fetchone() == (0,)


def test_a_migration_that_fails_changes_nothing(path: Path, upcoming: Path) -> None:
    database(path, REVISIONS[-1])
    before = dump(path)
    write_step(upcoming, f"{STEP}; op.execute('DELETE FROM autofa_measurement'); 1 / 0")
    with pytest.raises(ZeroDivisionError):
        Repository.open(path, write=True)
    assert dump(path) == before
    write_step(upcoming, STEP)
    assert exported(path, write=True) == expected(REVISIONS[-1])


def test_a_migration_without_room_for_its_copy_does_not_begin(
    path: Path, upcoming: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database(path, REVISIONS[-1])
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


def test_many_processes_migrate_once(path: Path, upcoming: Path) -> None:
    database(path, REVISIONS[-1])

    def work(number: int) -> None:
        with Repository.open(path, write=True) as repository:
            repository.add([make_row(f"test.kernel-{number}")])

    assert in_processes(6, work) == []
    assert len(exported(path).splitlines()) == len(expected(REVISIONS[-1]).splitlines()) + 6
    assert len(list(path.parent.glob("autofa.db.*-*Z"))) == 1
