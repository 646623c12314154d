"""A look through an SQLite database that leaves no trace: is it whole, whose rows does it hold."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from autofa.device import DeviceKey
from autofa.errors import StoreError
from autofa.store.columns import VIEW
from autofa.store.reader import as_store_error, connect, corrupt, present, revision_of, select
from autofa.store.rows import Row


@dataclass(frozen=True)
class Survey:
    """What a file holds.

    Attributes:
        revision: of its schema; None for a missing file and for one without tables.
        total: rows that may be dispatched, of all devices.
        rows: those of the devices that were asked for.
    """

    revision: str | None = None
    total: int = 0
    rows: tuple[Row, ...] = ()


def survey(path: Path, devices: Sequence[DeviceKey], timeout: float = 0.5) -> Survey:
    """Reads the whole file. Writes nothing and makes no file, waits `timeout` for a lock.

    Raises:
        StoreError: as `reader.read`, and where a page anywhere in the file is damaged.
    """
    if not present(path):
        return Survey()
    try:
        with closing(_open(path, timeout)) as connection:
            (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if answer != "ok":
                raise corrupt(str(path), str(answer).splitlines()[-1])
            revision = revision_of(connection, path)
            if revision is None:
                return Survey()
            rows = tuple(row for key in devices for row in select(connection, path, key))
            (total,) = connection.execute(f"SELECT count(*) FROM {VIEW}").fetchone()
            return Survey(revision, total, rows)
    except sqlite3.Error as error:
        raise as_store_error(error, str(path)) from error


def _open(path: Path, timeout: float) -> sqlite3.Connection:
    """Like `connect`, which in write-ahead logging leaves a `-wal` and a `-shm` behind where
    nobody else has the file open: then nobody writes either, and it can be read as it is."""
    try:
        with path.open("rb") as file:
            logged = file.read(20)[18:] == b"\2\2"
    except OSError as error:
        do = "check its permissions"
        raise StoreError(f"database {path}: {error.strerror}; {do}") from error
    wal = path.with_name(path.name + "-wal")
    alone = not path.with_name(path.name + "-shm").exists()
    if logged and alone and not (wal.exists() and wal.stat().st_size):
        return connect(path, timeout, immutable=True)
    return connect(path, timeout)


def is_writable(path: Path) -> bool:
    """Whether the file could be written, or made, with the folders that it would need."""
    if path.exists() and not os.access(path, os.W_OK | os.R_OK):
        return False
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
