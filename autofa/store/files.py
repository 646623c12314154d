"""An SQLite file before it is used: may it be written, is it sound, moving a damaged one aside."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from autofa.errors import StoreCorruptError, StoreUnwritableError, explain_bad
from autofa.store.columns import VIEW
from autofa.store.migrate import free_name
from autofa.store.reader import as_store_error, connect, corrupt, present, revision_of

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

_DO = "name a file you can write with --db or AUTOFA_DB"


def check_writable(path: Path) -> None:
    """Makes the file's folder if need be.

    Raises:
        StoreUnwritableError: the file cannot be written or made.
    """
    folder = path.absolute().parent
    try:
        if path.is_dir():
            raise unwritable(path, "a directory")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, f"{folder}: {error.strerror}") from error
    # SQLite makes its journal beside the file, so the folder counts too.
    if not os.access(folder, os.W_OK | os.X_OK):
        raise unwritable(path, f"the folder {folder}, which cannot be written")
    if path.exists() and not os.access(path, os.W_OK | os.R_OK):
        raise unwritable(path, "a file that cannot be written")


def unwritable(path: Path, got: str) -> StoreUnwritableError:
    return StoreUnwritableError(explain_bad(f"database {path}", got, "a writable file", _DO))


def inspect_file(path: Path, timeout: float, *, write: bool, thorough: bool = False) -> str | None:
    """The revision of a file's schema; None where it is missing or has no tables.

    Args:
        write: the caller is going to write. Then what a crashed writer left is rolled back, and
            a file with only other programs' tables may be shared, since ours bear a prefix.
        thorough: also hold every index against its table, which takes some times longer.

    Raises:
        StoreCorruptError: the file is damaged, or no database.
        StoreTooNewError: a newer version wrote it.
        StoreError: it cannot be read for another reason.
    """
    if not present(path):
        return None
    try:
        opened = sqlite3.connect(path, timeout=timeout) if write else connect(path, timeout)
        with closing(opened) as connection:
            look = "integrity_check" if thorough else "quick_check"
            (answer,) = connection.execute(f"PRAGMA {look}(1)").fetchone()
            if answer != "ok":
                raise corrupt(str(path), str(answer).splitlines()[-1])
            names = connection.execute("SELECT name FROM sqlite_master").fetchall()
            if write and not any(str(name).startswith("autofa_") for (name,) in names):
                return None
            return revision_of(connection, path)
    except sqlite3.Error as error:
        raise as_store_error(error, str(path)) from error


def has_view(path: Path, timeout: float) -> bool:
    """Whether the view that the runtime reads is there, in a file that was inspected before.

    Raises:
        StoreError: it cannot be read.
    """
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'view' AND name = ?"
    try:
        with closing(connect(path, timeout)) as connection:
            (count,) = connection.execute(query, (VIEW,)).fetchone()
    except sqlite3.Error as error:
        raise as_store_error(error, str(path)) from error
    return bool(count)


def move_aside(path: Path, timeout: float, *, thorough: bool = False) -> Path | None:
    """Renames a damaged file and its journals to `<name>.corrupt-<UTC time>`; never deletes.

    Returns the new name; None if another process has already replaced the file by a sound one.

    Raises:
        StoreUnwritableError: it cannot be renamed.
    """
    with _folder_lock(path):
        try:
            inspect_file(path, timeout, write=True, thorough=thorough)
        except StoreCorruptError:
            pass
        else:
            return None
        aside = free_name(path, "corrupt")
        try:
            path.rename(aside)
            for suffix in ("-wal", "-shm", "-journal"):
                companion = path.with_name(path.name + suffix)
                if companion.exists():
                    companion.rename(aside.with_name(aside.name + suffix))
        except OSError as error:
            raise unwritable(path, f"a damaged file: {error.strerror}") from error
        return aside


@contextmanager
def _folder_lock(path: Path) -> Iterator[None]:
    """Keeps other processes from moving files in this folder; leaves no file of its own."""
    if fcntl is None:
        yield
        return
    handle = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        # Some network file systems lock no folders; there the inspection alone must do.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def grant_wal(path: Path, patience: float = 2.0) -> bool:
    """Switches the file to write-ahead logging, where readers and a writer never wait.

    Returns False where the file system or another process's lock does not let it: then the
    rollback journal serves. The switch ignores the busy timeout, so it is tried again.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
                if mode != "wal":
                    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
                return bool(mode == "wal")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                return False
        time.sleep(0.01)
