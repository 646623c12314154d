"""The runtime's way into the database: the standard library's sqlite3, read-only, one SELECT.

Importing SQLAlchemy costs 232 ms, this 14 ms with its read; a test holds the two equal.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from autofa.device import DeviceKey
from autofa.errors import StoreCorruptError, StoreError, StoreLockedError, explain_bad
from autofa.store.columns import (
    DEVICE_COLUMNS,
    OWN_COLUMNS,
    RECORD_COLUMNS,
    SCHEMA,
    TABLES,
    VERSION_TABLE,
    VIEW,
    Decoder,
    device_values,
    is_newer,
    too_new,
    warn_damaged,
)
from autofa.store.rows import Row

# No ORDER BY: sorting 2,000 wide records costs SQLite 1 ms, Python 0.2.
_QUERY = (
    f"SELECT id, revision, {', '.join(RECORD_COLUMNS)} FROM {VIEW}"
    f" WHERE {' AND '.join(f'{name} = ?' for name in DEVICE_COLUMNS)}"
)

# A row's longest texts are 16,000 characters of details and 4,000 of message.
_MOST_BYTES = 1 << 20
_MOST_SECONDS = 5.0


def sqlite_path(location: str | os.PathLike[str]) -> Path | None:
    """The file that a path or an SQLite URL names; None for another server's URL.

    Raises:
        StoreError: it names no file at all.
    """
    text = os.fspath(location)
    scheme, separator, rest = text.partition("://")
    if separator:
        if scheme not in ("sqlite", "sqlite+pysqlite"):
            return None
        text = rest.partition("?")[0].removeprefix("/")
    if not text or text == ":memory:" or "\0" in text:
        supported = "a path, or a URL such as sqlite:///autofa.db"
        raise StoreError(explain_bad("database", text, supported, "name a file"))
    try:
        return Path(text).expanduser()
    except RuntimeError:
        supported = "a file; ~USER of a known user"
        raise StoreError(explain_bad("database", text, supported, "write its path")) from None


def read(location: str | os.PathLike[str], device: DeviceKey, *, timeout: float = 0.1) -> list[Row]:
    """The rows of exactly this device that may be dispatched, oldest first; [] without a file.

    These are the ok rows that no later failure of the same kernel in the same bucket contradicts.
    Writes nothing, and waits for a writer's commit `timeout` seconds at most. Any thread.

    Raises:
        StoreTooNewError: a newer version wrote the file.
        StoreCorruptError: the file is damaged, or no database.
        StoreError: it cannot be read for another reason, or is a server's URL.
    """
    path = sqlite_path(location)
    if path is None:
        supported = "SQLite files"
        scheme = os.fspath(location).partition("://")[0]
        raise StoreError(explain_bad("database for dispatch", scheme, supported, "name a file"))
    if not present(path):
        return []
    try:
        connection = connect(path, timeout)
        try:
            return select(connection, path, device)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise as_store_error(error, str(path)) from error


def select(connection: sqlite3.Connection, path: Path, device: DeviceKey) -> list[Row]:
    """The rows that `read` gives, through a connection that is open.

    Raises:
        StoreError: as `read`.
        sqlite3.Error: the file is damaged, or locked.
    """
    decoder = Decoder(device)
    try:
        with bounded(connection):
            try:
                records = connection.execute(_QUERY, device_values(device)).fetchall()
            except sqlite3.DatabaseError as error:
                if not any(sign in str(error) for sign in ("decode", "too big")):
                    raise
                # One text that is not UTF-8, or has 100 MB, must not hide the other rows.
                connection.text_factory = lenient_text
                records = _without_giants(connection, device, decoder)
    except sqlite3.OperationalError as error:
        if not str(error).startswith("no such "):
            raise
        revision = revision_of(connection, path)
        if revision is None:
            return []
        raise not_as_it_is(revision, str(path)) from error
    return decoded(records, decoder, str(path))


def decoded(records: list[tuple[Any, ...]], decoder: Decoder, where: str) -> list[Row]:
    """The rows of the view's records, which begin with their number and the database's revision.

    Raises:
        StoreTooNewError: a newer version wrote them.
    """
    if records and is_newer(records[0][1]):
        raise too_new(records[0][1], where)
    records.sort(key=itemgetter(0))
    rows = decoder.rows(record[2:] for record in records)
    warn_damaged(decoder.damaged, where)
    return rows


@contextmanager
def bounded(connection: sqlite3.Connection) -> Iterator[None]:
    """Neither a text that no row can have nor a view that never ends holds up a first call."""
    end = time.monotonic() + _MOST_SECONDS
    limit = None
    if sys.version_info >= (3, 11):
        limit = connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
    connection.set_progress_handler(lambda: time.monotonic() > end, 1_000_000)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)
        if sys.version_info >= (3, 11) and limit is not None:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limit)


def _without_giants(
    connection: sqlite3.Connection, device: DeviceKey, decoder: Decoder
) -> list[tuple[object, ...]]:
    """The records of `_QUERY` less those with a text that is too long, which count as damaged.

    Columns are probed in the order in which a record holds them: to get at what lies behind a text
    of 100 MB, SQLite reads all of it.
    """

    def giants(table: str, columns: str) -> list[int]:
        found = []
        for (number,) in connection.execute(f"SELECT id FROM {table} NOT INDEXED").fetchall():
            try:
                connection.execute(
                    f"SELECT {columns} FROM {table} WHERE id = ?", (number,)
                ).fetchone()
            except sqlite3.DataError:
                found.append(number)
        return found

    def listed(numbers: list[int]) -> str:
        return ", ".join(map(str, numbers))

    shared = listed(giants("autofa_provenance", "document"))
    query = f"SELECT id FROM autofa_measurement NOT INDEXED WHERE provenance_id IN ({shared})"
    lost = [number for (number,) in connection.execute(query)]
    lost += giants("autofa_measurement", f"bucket, problem, {', '.join(OWN_COLUMNS)}")
    decoder.damaged += len(lost)
    # Still refused where the view compares with one, the slug of a failure say: reading on would
    # take SQLite minutes, and calls can do without measurements.
    query = f"{_QUERY} AND id NOT IN ({listed(lost)})"
    return connection.execute(query, device_values(device)).fetchall()


def lenient_text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def present(path: Path) -> bool:
    """Whether there is a file to read.

    Raises:
        StoreError: something that is no file is in its place, or it cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StoreError(f"database {path}: {error.strerror}; check its permissions") from error
    if not stat.S_ISREG(mode):
        got = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        do = "name another file with --db or AUTOFA_DB"
        raise StoreError(explain_bad(f"database {path}", got, "an SQLite file", do))
    return True


def connect(path: Path, timeout: float, *, immutable: bool = False) -> sqlite3.Connection:
    """A read-only connection, in folders that cannot be written too.

    A file in WAL mode needs its `-shm` neighbour even to be read. Where the folder does not let it
    be made, or the disk is full, nobody can be writing there either, so the file is opened as
    immutable.

    Args:
        immutable: nobody is writing: open it so at once, which makes no neighbours.

    Raises:
        sqlite3.Error: it cannot be opened, or is no database.
    """
    name = os.fspath(path.absolute())
    for reserved, escape in (("%", "%25"), ("?", "%3f"), ("#", "%23")):
        name = name.replace(reserved, escape)
    if immutable:
        return _open(f"file:{name}?immutable=1", timeout)
    try:
        return _open(f"file:{name}?mode=ro", timeout)
    except sqlite3.OperationalError as error:
        signs = ("readonly", "unable to open", "disk I/O")
        refused = any(sign in str(error) for sign in signs)
        journal = path.with_name(path.name + "-journal")
        if not refused or not os.access(path, os.R_OK) or journal.exists():
            raise
        return _open(f"file:{name}?immutable=1", timeout)


def _open(uri: str, timeout: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        uri, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False
    )
    try:
        # Opening reads nothing yet; this reads the header and takes the first lock.
        connection.execute("PRAGMA schema_version").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def revision_of(connection: sqlite3.Connection, path: Path) -> str | None:
    """The schema's revision; None for a database without tables.

    Raises:
        StoreError: it holds another program's tables and none of ours, or a trigger on ours.
        StoreCorruptError: our tables have no single revision, or one of them is missing.
        StoreTooNewError: a newer version wrote it.
    """
    found = connection.execute("SELECT name, type, tbl_name FROM sqlite_master").fetchall()
    names = {name for name, kind, _ in found if kind in ("table", "view")}
    if VERSION_TABLE not in names:
        if any(str(name).startswith("autofa_") for name in names):
            raise corrupt(str(path), "tables without a revision")
        if names:
            do = "name another file with --db or AUTOFA_DB, or run `autofa tune` to add ours"
            raise StoreError(
                explain_bad(f"database {path}", "other programs' tables", "autofa's own", do)
            )
        return None
    for name, kind, table in found:
        # A trigger is code that would run as we write, and might do anything to the rows.
        if kind == "trigger" and str(table).startswith("autofa_"):
            do = "drop it, or name another file with --db or AUTOFA_DB"
            got = f"a trigger on {table}: {name!a:.60}"
            raise StoreError(explain_bad(f"database {path}", got, "tables without code", do))
    tables = {name for name, kind, _ in found if kind == "table"}
    lost = [table for table in TABLES if table not in tables]
    if lost:
        raise corrupt(str(path), f"no table {lost[0]}")
    revisions = connection.execute(f"SELECT version_num FROM {VERSION_TABLE} LIMIT 2").fetchall()
    if len(revisions) != 1:
        raise corrupt(str(path), f"{len(revisions)} revisions")
    ((revision,),) = revisions
    if is_newer(revision):
        raise too_new(revision, str(path))
    return str(revision)


def not_as_it_is(revision: str, where: str) -> StoreError:
    """A database of an older schema than this version reads, or of today's without its view."""
    got, do = f"schema {revision}", "the next `autofa tune` migrates it"
    if revision == SCHEMA:
        got, do = f"no view {VIEW}", "the next `autofa tune` makes it anew"
    return StoreError(explain_bad(f"database {where}", got, f"schema {SCHEMA}, whole", do))


def corrupt(where: str, got: str) -> StoreCorruptError:
    do = "`autofa db check` or the next `autofa tune` moves it aside; or name another with --db"
    return StoreCorruptError(explain_bad(f"database {where}", got, "an intact SQLite file", do))


def as_store_error(error: Exception, where: str) -> StoreError:
    """The error of our tree for one of sqlite3's."""
    text = str(error)
    if any(sign in text for sign in ("malformed", "not a database", "corrupt", "decode")):
        return corrupt(where, text)
    if "too big" in text:
        do = "`autofa db export` keeps what is sound, for a new database"
        got, supported = f"a text of more than {_MOST_BYTES} bytes", "measurements"
        return StoreError(explain_bad(f"database {where}", got, supported, do))
    if "locked" in text:
        do = "try again when the other process is done"
        got, supported = "a lock held by another", "a database that is free"
        return StoreLockedError(explain_bad(f"database {where}", got, supported, do))
    do = "check the file's permissions and disk, or name another with --db or AUTOFA_DB"
    return StoreError(explain_bad(f"database {where}", text, "a readable SQLite file", do))
