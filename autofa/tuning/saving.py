"""Rows on their way to the database: kept while another process holds it or its server is away, and
saved when it is there again."""

from __future__ import annotations

import time
from collections.abc import Sequence

from autofa.errors import StoreLockedError, StoreUnreachableError
from autofa.store.repository import Repository
from autofa.store.rows import Row
from autofa.tuning.events import Notice, OnEvent

# Seconds that one attempt waits for the lock. No signal is answered meanwhile.
LOCK_S = 10.0
# Between an attempt that failed and the next one, while there is measuring to do.
PAUSE_S = 30.0
# The same of a server that is away; it may cost `urls.CONNECT_TIMEOUT` to find that out.
AWAY_PAUSE_S = 10.0
# How long the end of a tune waits for the lock; nobody holds one so long on purpose.
PATIENCE_S = 600.0


class Saver:
    """Saves rows in order. Not thread-safe.

    Attributes:
        unsaved: rows that are in no database yet.
    """

    def __init__(self, repository: Repository, emit: OnEvent) -> None:
        self._repository = repository
        self._emit = emit
        self._next = 0.0
        self._away: StoreUnreachableError | None = None
        self.unsaved: list[Row] = []

    def save(self, rows: Sequence[Row]) -> None:
        """Takes rows, and writes all that are not written, if the database is free.

        Raises:
            StoreError: it cannot be written for another reason.
        """
        self.unsaved += rows
        if self.unsaved and time.monotonic() >= self._next:
            self._attempt()

    def finish(self, patience_s: float) -> None:
        """Waits until all is written. A row of before that was written after all is no second one.

        Raises:
            StoreLockedError: another process has held the database for `patience_s` seconds.
            StoreUnreachableError: its server has been away for so long.
        """
        deadline = time.monotonic() + patience_s
        while self.unsaved and not self._attempt():
            if time.monotonic() > deadline:
                if self._away is not None:
                    raise StoreUnreachableError(
                        f"{self._away}; {len(self.unsaved)} results are lost; run the same command "
                        "again when it answers"
                    )
                raise StoreLockedError(
                    f"database {self._repository.where}: got a lock that another process did not "
                    f"give back in {patience_s:.0f} s; {len(self.unsaved)} results are lost; end "
                    "that process and run the same command again"
                )
            time.sleep(0.05 if self._away is None else 1.0)

    def flush(self) -> None:
        """Writes all that is not written, now.

        Raises:
            StoreError: it cannot be written.
        """
        self._repository.add(self.unsaved)
        self.unsaved.clear()
        self._next = 0.0

    def _attempt(self) -> bool:
        self._away = None
        try:
            self.flush()
        except StoreUnreachableError as error:
            self._away = error
            if not self._next:
                self._emit(Notice(f"{error}; results are kept and saved when it answers again"))
            self._next = time.monotonic() + AWAY_PAUSE_S
            return False
        except StoreLockedError:
            if not self._next:
                self._emit(
                    Notice(
                        f"{self._repository.where} is locked by another process; results are kept "
                        "and saved when it is free again"
                    )
                )
            self._next = time.monotonic() + PAUSE_S
            return False
        return True
