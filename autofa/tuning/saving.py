"""Rows on their way to the database: kept while another process holds it, saved when it is free."""

from __future__ import annotations

import time
from collections.abc import Sequence

from autofa.errors import StoreLockedError
from autofa.store.repository import Repository
from autofa.store.rows import Row
from autofa.tuning.events import Notice, OnEvent

# Seconds that one attempt waits for the lock. No signal is answered meanwhile.
LOCK_S = 10.0
# Between an attempt that failed and the next one, while there is measuring to do.
PAUSE_S = 30.0
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
        """
        deadline = time.monotonic() + patience_s
        while self.unsaved and not self._attempt():
            if time.monotonic() > deadline:
                raise StoreLockedError(
                    f"database {self._repository.where}: got a lock that another process did not "
                    f"give back in {patience_s:.0f} s; {len(self.unsaved)} results are lost; end "
                    "that process and run the same command again"
                )
            time.sleep(0.05)

    def _attempt(self) -> bool:
        try:
            self._repository.add(self.unsaved)
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
        self.unsaved.clear()
        self._next = 0.0
        return True
