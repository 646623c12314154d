"""SQLAlchemy engines of a database by path or URL, and their errors in terms of our tree."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event, exc
from sqlalchemy.engine import URL, make_url
from sqlalchemy.pool import NullPool

from autofa.errors import StoreError, StoreUnwritableError, explain_bad
from autofa.store.reader import as_store_error, connect, lenient_text
from autofa.store.urls import (
    CONNECT_TIMEOUT,
    NO_DRIVER,
    driver_url,
    malformed,
    no_answer,
    server_name,
)


def reading_engine(path: Path, timeout: float) -> Engine:
    """Of an SQLite file: read-only, waits for nobody but a commit."""

    def open_connection() -> sqlite3.Connection:
        connection = connect(path, timeout)
        connection.text_factory = lenient_text
        return connection

    return create_engine("sqlite://", creator=open_connection, poolclass=NullPool)


def writing_engine(path: Path, timeout: float) -> Engine:
    """Of an SQLite file: every transaction takes the write lock as it begins.

    A transaction that reads first and locks later fails at once where another writer came between;
    one that begins with the lock waits.
    """

    def open_connection() -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)

    engine = create_engine("sqlite://", creator=open_connection, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def begin_immediate(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def server_engine(location: str) -> tuple[Engine, str]:
    """Of a server's URL, and its name for messages, which holds neither user nor password.

    Raises:
        StoreError: the URL is malformed, its kind is not supported, or the driver is missing.
    """
    where = server_name(location)
    try:
        url = make_url(driver_url(location))
    except (exc.ArgumentError, ValueError):
        raise malformed(where.partition("://")[0]) from None
    try:
        engine = create_engine(
            url, connect_args={"connect_timeout": CONNECT_TIMEOUT}, pool_pre_ping=True
        )
    except ImportError as error:
        got = f"no module {error.name}"
        raise StoreError(explain_bad(f"driver of {where}", got, *NO_DRIVER)) from None
    return engine, where


@contextmanager
def translated(where: str, url: URL | None = None) -> Iterator[None]:
    """Raises the database's errors as `StoreError`, without a password.

    A full disk or a file that has become read-only is a `StoreUnwritableError`.
    """
    try:
        yield
    except exc.DBAPIError as error:
        cause = error.orig or error
        away = isinstance(error, exc.OperationalError | exc.InterfaceError)
    except sqlite3.Error as error:
        cause, away = error, False
    else:
        return
    if url is not None:
        secrets = (url.password or "", *(str(value) for value in url.query.values()))
        raise no_answer(where, cause, secrets, away=away) from None
    text = " ".join(str(cause).split())
    if any(sign in text for sign in ("readonly", "full", "disk I/O", "unable to open")):
        do = "free the disk, or name a file you can write with --db or AUTOFA_DB"
        raise StoreUnwritableError(
            explain_bad(f"database {where}", text, "a writable file", do)
        ) from cause
    raise as_store_error(cause, where) from cause
