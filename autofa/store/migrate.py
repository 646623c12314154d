"""Brings a database to today's schema: under a lock, in one transaction, or not at all."""

from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect, text

from autofa.resources import db_dir
from autofa.store.columns import SCHEMA, VERSION_TABLE, VIEW, is_newer, too_new

# Alembic's `op` and `context` are globals of the process.
_alembic = threading.Lock()
# Any number, but the same in every process: PostgreSQL's advisory lock of our writers.
_ADVISORY = 0x4175746F6661


def upgrade(engine: Engine, where: str, path: Path | None, folder: Path | None = None) -> None:
    """Creates or migrates the tables, and makes a view that is missing anew. Concurrent callers
    wait; all but the first find it done.

    The engine's transactions must begin by taking the write lock (`BEGIN IMMEDIATE` on SQLite).

    Args:
        where: the database's name in messages.
        path: an SQLite database's file; an older one is copied beside itself first.
        folder: the migrations; None means the shipped ones.

    Raises:
        StoreTooNewError: a newer version wrote it; nothing is changed.
        sqlalchemy.exc.DBAPIError: the database refused.
    """
    config = Config()
    # ConfigParser reads % as interpolation.
    location = str(folder or db_dir() / "migrations").replace("%", "%%")
    config.set_main_option("script_location", location)
    with _alembic, engine.begin() as connection:
        one_writer(connection)
        found = revision(connection, where)
        if found == SCHEMA:
            if VIEW not in inspect(connection).get_view_names():
                connection.execute(text(_view(config)))
            return
        if found is not None and path is not None:
            back_up(path, found)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def one_writer(connection: Connection) -> None:
    """Keeps other writers of ours out until this transaction ends, as SQLite does by itself: two
    that add the same rows in another order would wait for one another."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY})


def _view(config: Config) -> str:
    """The statement that makes the runtime's view: of the newest revision that has one."""
    revisions = ScriptDirectory.from_config(config).walk_revisions()
    found = (getattr(script.module, "DISPATCH", None) for script in revisions)
    return str(next(filter(None, found)))


def revision(connection: Connection, where: str) -> str | None:
    """The schema's revision; None where there is no table of ours.

    Raises:
        StoreTooNewError: a newer version wrote it.
    """
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().first()
    if is_newer(found):
        raise too_new(found, where)
    return str(found)


def back_up(path: Path, revision: str) -> Path:
    """Copies an SQLite file before its schema changes; returns the copy's path."""
    copy = free_name(path, revision)
    try:
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
    except BaseException:  # half a copy, on a full disk say, would pass for one
        copy.unlink(missing_ok=True)
        raise
    return copy


def free_name(path: Path, mark: str) -> Path:
    """`<name>.<mark>-<UTC time>` beside a file: a name that nothing has yet, since a clock that
    jumped back may give a time twice."""
    now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S%f")
    found = path.with_name(f"{path.name}.{mark}-{now}Z")
    count = 1
    while os.path.lexists(found):
        count += 1
        found = path.with_name(f"{path.name}.{mark}-{now}-{count}Z")
    return found
