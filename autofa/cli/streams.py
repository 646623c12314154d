"""stdout and stderr that may be full, closed or gone: never a traceback, never half of the work.

A reader that goes away (`autofa report | head`) is no error. Any other loss of what was written to
stdout is one line and exit code 1; a loss of stderr changes nothing.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO


class _Raw(io.FileIO):
    """A file descriptor that takes everything; `lost` is why something did not arrive."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        if self.lost is None:
            try:
                return super().write(data)
            except OSError as error:
                self.lost = error
        return memoryview(data).nbytes


def _occupy(number: int, flags: int) -> None:
    """Fills a closed descriptor: the next file opened, a database say, would get its number."""
    try:
        os.fstat(number)
    except OSError:
        taken = os.open(os.devnull, flags)
        if taken != number:
            os.dup2(taken, number)
            os.close(taken)


def _wrap(number: int, like: object) -> tuple[_Raw, io.TextIOWrapper]:
    raw = _Raw(number)
    known = like if isinstance(like, io.TextIOWrapper) else None
    text = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=known.encoding if known else "utf-8",
        errors="replace",  # a terminal that cannot show a character gets another, no exception
        line_buffering=known.line_buffering if known else False,
        write_through=False,
    )
    return raw, text


class Output:
    """Takes the place of `sys.stdout` and `sys.stderr` for a command's whole process."""

    def __init__(self) -> None:
        # Descriptors that were closed are opened so that writing to stdout fails as it should.
        _occupy(0, os.O_RDONLY)
        _occupy(1, os.O_RDONLY)
        _occupy(2, os.O_WRONLY)
        self._out, sys.stdout = _wrap(1, sys.stdout)
        _, sys.stderr = _wrap(2, sys.stderr)

    def finish(self, code: int) -> int:
        """Writes what is left; the exit code of the process, given the command's own."""
        sys.stdout.flush()
        lost = self._out.lost
        if lost is not None and lost.errno != errno.EPIPE:
            got = os.strerror(lost.errno) if lost.errno else str(lost)
            print(
                f"error: stdout: got {got!r}; supported: a stream that takes the result; "
                "free its disk, or send it elsewhere",
                file=sys.stderr,
            )
            code = code or 1
        sys.stderr.flush()
        return code


def go_to_one_place(first: TextIO, second: TextIO) -> bool:
    """Whether both end in the same terminal, pipe or file, so that nothing need be said twice."""
    try:
        a, b = (os.fstat(stream.fileno()) for stream in (first, second))
    except (OSError, ValueError):
        return False
    return os.path.samestat(a, b)
