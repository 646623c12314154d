"""Reads a compiler's output: the one line that matters, death by memory, resource usage."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """What one CUDA kernel takes.

    Attributes:
        registers: per thread, the most of any kernel in the library.
        smem_bytes: shared memory of one block, static and dynamic.
        spill_bytes: bytes of registers stored to and loaded from local memory, per thread.
    """

    registers: int
    smem_bytes: int
    spill_bytes: int


# In order of preference; what comes first in the log wins among equals.
_TELLING = (
    re.compile(r"\bfatal error:|\bfatal\s*:"),
    re.compile(r"\berror\s*:|\berror -- |: error\b", re.IGNORECASE),
    re.compile(r"undefined reference|cannot find|not found|No such file"),
)
_KILLED = re.compile(
    r"Killed signal|died due to signal 9|\bKilled\b|virtual memory exhausted"
    r"|out of memory allocating|[Cc]annot allocate memory|bad_alloc"
)
_MAX_LINE = 300


def headline(log: str, roots: tuple[str, ...] = ()) -> str:
    """The most telling line of a failed compiler's output, without the source tree's path."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for pattern in _TELLING:
        found = next((line for line in lines if pattern.search(line)), None)
        if found is not None:
            break
    else:
        found = lines[-1] if lines else "the compiler failed and said nothing"
    for root in sorted(roots, key=len, reverse=True):
        found = found.replace(f"{root}/", "")
    return found if len(found) <= _MAX_LINE else f"{found[: _MAX_LINE - 3]}..."


# ptxas gives wgmma up as asynchronous and puts a wait behind each: C7508, C7510 to C7515. C7519, a
# fence that it adds, costs nothing.
_SERIALIZED = re.compile(r"\(C75(?:08|1[0-5])\)[^\n]*")


def serialized(log: str) -> str | None:
    """What ptxas said of wgmma that it serialized: nothing runs beside such products."""
    found = _SERIALIZED.search(log)
    return found.group()[:_MAX_LINE] if found else None


def killed_for_memory(code: int, log: str) -> bool:
    """Whether a compiler with exit status `code` (negative: a signal) died for want of memory."""
    return code in (-9, 137) or (code != 0 and _KILLED.search(log) is not None)


def parse_usage(log: str, dynamic_smem_bytes: int) -> Usage | None:
    """What `ptxas -v` reported; None if the log holds no such report."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    if not registers:
        return None
    static = [int(n) for n in re.findall(r"(\d+) bytes smem", log)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return Usage(
        max(registers),
        max(static, default=0) + dynamic_smem_bytes,
        max((int(stores) + int(loads) for stores, loads in spills), default=0),
    )
