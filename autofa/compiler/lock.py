"""A lock between processes that dies with its holder, and tells who that is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from pathlib import Path
from types import TracebackType


class Lock:
    """An exclusive `flock` on a file of `folder`. One object per thread; not re-entrant.

    The kernel drops it when the holder ends, however it ends, so a lock is never stale. Compilers
    do not inherit it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / ".lock"
        self._file: int | None = None

    def acquire(self) -> bool:
        """Takes the lock if it is free now.

        Raises:
            OSError: the folder cannot be written.
        """
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        except BaseException:
            os.close(file)
            raise
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200]
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} ({command})".encode(errors="replace"))
        self._file = file
        return True

    def holder(self) -> str:
        """Who has the lock, as far as the holder has said."""
        with contextlib.suppress(OSError):
            return self._path.read_text(errors="replace") or "another process"
        return "another process"

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
