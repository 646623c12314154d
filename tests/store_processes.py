"""Other processes for the tests of the store: many at once, and one without root's rights."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

PROCESSES = multiprocessing.get_context("fork")


def in_processes(count: int, work: Callable[[int], None]) -> list[str]:
    """Runs `work(i)` in that many processes that start together; returns what they raised."""
    barrier = PROCESSES.Barrier(count)
    results: Any = PROCESSES.SimpleQueue()

    def run(number: int) -> None:
        barrier.wait(30)
        try:
            work(number)
            results.put("")
        except BaseException as error:
            results.put(f"{type(error).__name__}: {error}")

    children = [PROCESSES.Process(target=run, args=(number,)) for number in range(count)]
    for child in children:
        child.start()
    found = [results.get() for _ in children]
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    return [text for text in found if text]


def without_rights(work: Callable[[], None]) -> None:
    """Runs `work` as a user who may write nothing of root's, in a process of its own."""
    if os.getuid() != 0:
        work()
        return

    def drop_and_work(number: int) -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        work()

    assert in_processes(1, drop_and_work) == []
