"""Keeps two tunes of like devices on one database from measuring one problem at the same time.

A claim is a lock on one byte of a file beside the SQLite database, or an advisory lock on a server;
it dies with its process. It saves work and nothing else: without it rows would be measured twice,
and both kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from types import TracebackType
from typing import Protocol

from autofa.device import DeviceKey
from autofa.problem import Problem
from autofa.store.advisory import Advisory
from autofa.store.reader import sqlite_path

_SLOTS = 1 << 30


class Claims(Protocol):
    """The claims of one process on problems of one kind of device."""

    def take(self, problem: Problem) -> bool:
        """Claims it; False if another process has it."""

    def release(self, problem: Problem) -> None:
        """Gives a claim back."""


class ServerClaims:
    """On a server, for as long as the connection of `locks` lives."""

    def __init__(self, locks: Advisory, device: DeviceKey) -> None:
        self._locks = locks
        self._device = device

    def _name(self, problem: Problem) -> str:
        return f"autofa: claim of {self._device!r} {problem!r}"

    def take(self, problem: Problem) -> bool:
        return self._locks.take(self._name(problem))

    def release(self, problem: Problem) -> None:
        self._locks.release(self._name(problem))


class FileClaims:
    """Beside a local database."""

    def __init__(self, db: str, device: DeviceKey) -> None:
        self._device = device
        self._file = None
        path = sqlite_path(db)
        if path is not None:
            with contextlib.suppress(OSError):
                self._file = path.with_name(f"{path.name}.tuning").open("ab")

    def __enter__(self) -> FileClaims:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _slot(self, problem: Problem) -> int:
        digest = hashlib.sha256(repr((self._device, problem)).encode()).digest()
        return int.from_bytes(digest[:8], "little") % _SLOTS

    def take(self, problem: Problem) -> bool:
        """Claims it; False if another process has it. File systems without locks grant all."""
        if self._file is None:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._slot(problem))
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return True
        return True

    def release(self, problem: Problem) -> None:
        """Gives a claim back."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._slot(problem))
