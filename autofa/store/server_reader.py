"""The runtime's way into a server's database: psycopg, one SELECT of the view, in bounded time.

Importing psycopg and reading costs half of what SQLAlchemy's way does; a test holds the two equal.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from autofa.device import DeviceKey
from autofa.errors import StoreError, explain_bad
from autofa.store.columns import (
    DEVICE_COLUMNS,
    RECORD_COLUMNS,
    SCHEMA,
    VERSION_TABLE,
    VIEW,
    Decoder,
    device_values,
    is_newer,
    too_new,
)
from autofa.store.reader import decoded, not_as_it_is
from autofa.store.rows import Row
from autofa.store.urls import CONNECT_TIMEOUT, NO_DRIVER, malformed, no_answer, server_name

if TYPE_CHECKING:
    import psycopg

_QUERY = (
    f"SELECT id, revision, {', '.join(RECORD_COLUMNS)} FROM {VIEW}"
    f" WHERE {' AND '.join(f'{name} = %s' for name in DEVICE_COLUMNS)}"
)


def read(location: str, device: DeviceKey, *, limit: float) -> list[Row]:
    """What `reader.read` gives of a file: this device's rows that may be dispatched, oldest first.

    Args:
        limit: seconds after which the connection is cut.

    Raises:
        StoreTooNewError: a newer version wrote the database.
        StoreError: the URL cannot be used, the driver is missing, the server does not answer, or
            the tables are not those of this version.
    """
    where = server_name(location)
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ImportError as error:
        raise StoreError(explain_bad(f"driver of {where}", str(error), *NO_DRIVER)) from None
    try:
        options = conninfo_to_dict("postgresql://" + location.partition("://")[2])
    except psycopg.Error:  # whose text may hold a part of the password
        raise malformed(where.partition("://")[0]) from None
    options.setdefault("connect_timeout", CONNECT_TIMEOUT)
    options.setdefault("application_name", "autofa")
    secrets = [str(options.get(name) or "") for name in ("password", "sslpassword")]
    try:
        with psycopg.connect(**options, autocommit=True) as connection, _cut(connection, limit):  # type: ignore[arg-type]
            try:
                records: list[Any] = connection.execute(_QUERY, device_values(device)).fetchall()
            except psycopg.errors.UndefinedTable:
                return _without_view(connection, where)
    except psycopg.Error as error:
        raise no_answer(where, error, secrets) from None
    return decoded(records, Decoder(device), where)


def _without_view(connection: psycopg.Connection[Any], where: str) -> list[Row]:
    """No rows where there are no tables of ours; else they are another version's, or damaged."""
    (table,) = connection.execute("SELECT to_regclass(%s)", (VERSION_TABLE,)).fetchone() or (None,)
    if table is None:
        return []
    found = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()
    revision = found[0] if found else SCHEMA
    if is_newer(revision):
        raise too_new(revision, where)
    raise not_as_it_is(revision, where)


@contextmanager
def _cut(connection: psycopg.Connection[Any], limit: float) -> Iterator[None]:
    """Breaks the connection after `limit` seconds: a server that has stopped between question and
    answer would keep the thread for ever."""
    handle = os.dup(connection.fileno())
    with socket.socket(fileno=handle) as line:

        def shut() -> None:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(limit, shut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
