"""A lock between processes that dies with its holder, and tells who that is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
from pathlib import Path
from types import TracebackType

# A forked child has the files of its parent's threads, and with them would keep their locks: from
# others when the parent is done, and from itself. No fork happens between opening and noting one.
_held: set[int] = set()
_noting = threading.Lock()


def _after_fork() -> None:
    for file in _held:
        os.close(file)  # the parent's own keeps the lock
    _held.clear()
    _noting.release()


os.register_at_fork(
    before=_noting.acquire, after_in_parent=_noting.release, after_in_child=_after_fork
)


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
        with _noting:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                return False
            except BaseException:
                os.close(file)
                raise
            _held.add(file)
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
        file, self._file = self._file, None
        with _noting:
            if file in _held:  # not in a child, where the number may be another file's
                _held.remove(file)
                os.close(file)

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
