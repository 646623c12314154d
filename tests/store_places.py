"""Databases of every kind that the store's contract is tested on, seen alike."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, inspect, text

from autofa.device import DeviceKey
from autofa.resources import db_dir
from autofa.store import reader, server_reader
from autofa.store.columns import TABLES
from autofa.store.repository import Repository
from autofa.store.rows import Row

# Makes another empty database of the kind that is being tested.
Databases = Callable[[], str]


def is_file(location: str | Path) -> bool:
    return reader.sqlite_path(location) is not None


def engine_of(location: str) -> Engine:
    """For what only a test does to a database."""
    if not is_file(location):
        return create_engine(location)
    return create_engine("sqlite://", creator=lambda: sqlite3.connect(location))


def execute(location: str, statement: str, **values: object) -> list[tuple[Any, ...]]:
    """Runs one statement; its records, where it gives any."""
    engine = engine_of(location)
    try:
        with engine.begin() as connection:
            found = connection.execute(text(statement), values)
            return [tuple(record) for record in found] if found.returns_rows else []
    finally:
        engine.dispose()


def read(location: str, device: DeviceKey) -> list[Row]:
    """The rows that dispatch gets."""
    if is_file(location):
        return reader.read(location, device)
    return server_reader.read(location, device, limit=10)


def stored(location: str) -> list[Row]:
    """All rows, every one sound."""
    with Repository.open(location, write=False) as repository:
        found = repository.audit()
    assert found.damaged == ()
    return list(found.rows)


def clear(location: str) -> None:
    """Takes all rows out; the tables stay."""
    for table in reversed(TABLES):
        execute(location, f"DELETE FROM {table}")


def tables(location: str) -> list[tuple[str, ...]]:
    """Tables, views, columns and indexes, for comparison."""
    engine = engine_of(location)
    try:
        look = inspect(engine)
        names = [*look.get_table_names(), *look.get_view_names()]
        columns = [(name, str(c["name"])) for name in names for c in look.get_columns(name)]
        indexes = [(name, str(i["name"])) for name in names for i in look.get_indexes(name)]
        return sorted([*columns, *indexes])
    finally:
        engine.dispose()


def install(location: str, script: Path, revision: str) -> None:
    """Makes a database of an older schema: on a server by the migrations up to it, filled with the
    rows of an SQLite dump of that schema."""
    with closing(sqlite3.connect(location if is_file(location) else ":memory:")) as source:
        source.executescript(script.read_text(encoding="utf-8"))
        if is_file(location):
            return
        engine = engine_of(location)
        config = Config()
        config.set_main_option("script_location", str(db_dir() / "migrations"))
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
            for table in TABLES:
                found = source.execute(f"SELECT * FROM {table}")
                names = [column[0] for column in found.description]
                marks = ", ".join(f":{name}" for name in names)
                insert = text(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})")
                connection.execute(insert, [dict(zip(names, r, strict=True)) for r in found])
                last = f"(SELECT max(id) FROM {table})"
                connection.execute(text(f"SELECT setval('{table}_id_seq', {last})"))
        engine.dispose()
