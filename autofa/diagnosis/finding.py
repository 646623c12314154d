"""A finding, and how each is come by: within a time limit, whatever breaks meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from autofa.errors import AutofaError


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        area: what it is about: `settings`, `torch`, `gpu`, `database`, `kernels`, `compilers`,
            `cache` or `vendors`.
        level: `ok`; `info`, which may be as it should; `problem`: autofa does not work because of
            it, or is slow and does not say so.
        found: one sentence.
        cure: what to do; empty where there is nothing to do.
    """

    area: str
    level: str
    found: str
    cure: str = ""


def ok(area: str, found: str) -> Finding:
    return Finding(area, "ok", found)


def info(area: str, found: str, cure: str = "") -> Finding:
    return Finding(area, "info", found, cure)


def problem(area: str, found: str, cure: str) -> Finding:
    return Finding(area, "problem", found, cure)


def of_error(area: str, error: AutofaError, level: str = "problem") -> Finding:
    """An error of ours, whose message ends in what to do."""
    found, _, cure = " ".join(str(error).split()).rpartition("; ")
    return Finding(area, level, found or str(error), cure if found else "")


def examine(area: str, look: Callable[[], Iterable[Finding]], seconds: float) -> list[Finding]:
    """What `look` yields, and that it broke or was not done after so many seconds."""
    found: list[Finding] = []
    broke: list[BaseException] = []

    def run() -> None:
        try:
            for finding in look():
                found.append(finding)
        except BaseException as error:
            broke.append(error)

    # A file system that hangs cannot be interrupted, only left behind.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    done = list(found)
    if thread.is_alive():
        cure = "see whether the disks and servers that it is on answer"
        done.append(problem(area, f"looking at it was given up after {seconds:g} s", cure))
    elif broke and isinstance(broke[0], AutofaError):
        done.append(of_error(area, broke[0]))
    elif broke:
        said = " ".join(f"{type(broke[0]).__name__}: {broke[0]}".split())
        cure = "mend what it names; if that is autofa itself, please report it"
        done.append(problem(area, f"looking at it failed: {said}", cure))
    return done


@contextmanager
def silence() -> Iterator[None]:
    """Keeps autofa's warnings off stderr: what they say is among the findings."""
    log = logging.getLogger("autofa")
    handler, propagate = logging.NullHandler(), log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.propagate = propagate
        log.removeHandler(handler)
