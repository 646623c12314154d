"""Locks by name on a PostgreSQL server, which die with the connection that holds them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from types import TracebackType

from sqlalchemy import Connection, exc, text
from sqlalchemy.engine import URL

from autofa.errors import StoreError, StoreUnreachableError
from autofa.store.engines import server_engine, translated

# Seconds after which a holder of `hold` passes for hanging. Such locks are held for about one, and
# a hundred may wait.
_PATIENCE_S = 120


class Advisory:
    """The locks of one process, on a connection of their own. Not thread-safe.

    After the connection was lost, by a restart of the server say, the next call takes again what
    `take` had given; what somebody else was quicker to take stays lost, in silence. A pooler
    between us and the server must give each client a connection of its own.
    """

    def __init__(self, location: str) -> None:
        self._engine, self.where = server_engine(location)
        self._engine = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._connection: Connection | None = None
        self._held: set[int] = set()

    def __enter__(self) -> Advisory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._drop()
        self._engine.dispose()

    @property
    def url(self) -> URL:
        return self._engine.url

    def take(self, name: str) -> bool:
        """Takes a lock if it is free, until `release`; False if somebody has it.

        Raises:
            StoreUnreachableError: the server is away.
        """
        key = _key(name)
        if self._ask("SELECT pg_try_advisory_lock(:key)", key):
            self._held.add(key)
            return True
        return False

    def release(self, name: str) -> None:
        """Gives a lock back that `take` gave."""
        key = _key(name)
        self._held.discard(key)
        self._unlock(key)

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Waits for a lock and has it within the block.

        Raises:
            StoreUnreachableError: the server is away, or others held it for 120 s.
        """
        key = _key(name)
        self._ask("SELECT pg_advisory_lock(:key)", key)
        try:
            yield
        finally:
            self._unlock(key)

    def _unlock(self, key: int) -> None:
        if self._connection is not None:
            with contextlib.suppress(StoreError):  # lost with the connection: free already
                self._ask("SELECT pg_advisory_unlock(:key)", key)

    def _ask(self, statement: str, key: int) -> object:
        was_open = self._connection is not None
        try:
            return self._once(statement, key)
        except StoreUnreachableError:
            if not was_open:
                raise
        return self._once(statement, key)  # an old connection says nothing of the server today

    def _once(self, statement: str, key: int) -> object:
        with translated(self.where, self._engine.url):
            try:
                return self._connected().execute(text(statement), {"key": key}).scalar()
            except BaseException:  # an interrupt leaves it in the middle of an answer
                self._drop()
                raise

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = self._engine.connect()
            self._connection.execute(text(f"SET lock_timeout = '{_PATIENCE_S}s'"))
            for key in self._held:
                self._connection.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": key})
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(exc.DBAPIError):
                # Not back to the pool: a session's locks end with its connection only.
                connection.invalidate()
                connection.close()


def _key(name: str) -> int:
    """The number that the server knows a lock by."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
