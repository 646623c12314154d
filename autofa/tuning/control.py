"""How a tune is stopped before its end: by its budget, by a signal, or from another thread."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class Stopped(Exception):
    """The budget is spent, or a `StopToken` was cancelled."""


class StopToken:
    """Asks a running tune to end at its next step. Thread-safe; cannot be taken back."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        self._event.set()

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()


# What is being measured when the budget ends may take so much longer to come to its end.
GRACE_S = 3.0
PHASES = ("checking", "timing", "waiting for compilers")


class Control:
    """The wall clock of one tune.

    Attributes:
        phases: what the tune's own thread did -> seconds.

    Args:
        budget_s: seconds from now; None has no end.
    """

    def __init__(
        self,
        budget_s: float | None,
        token: StopToken,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._start = now()
        self._budget = math.inf if budget_s is None else budget_s
        self.token = token
        self.phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time within it as that of one of `PHASES`."""
        began = self._now()
        try:
            yield
        finally:
            self.phases[name] += self._now() - began

    @property
    def elapsed(self) -> float:
        return self._now() - self._start

    @property
    def left(self) -> float:
        """Seconds of the budget that are left; infinite without one."""
        return self._budget - self.elapsed

    @property
    def spent(self) -> bool:
        return self.left <= 0

    def check(self) -> None:
        """Goes on.

        Raises:
            Stopped: it must not.
        """
        if self.token.cancelled or self.spent:
            raise Stopped

    def wait(self) -> None:
        """Goes on waiting for what runs already, beyond the budget by a grace of 3 s.

        Raises:
            Stopped: it must not.
        """
        if self.token.cancelled or self.left < -GRACE_S:
            raise Stopped


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Within it, SIGINT and SIGTERM raise `Interrupted` in the main thread, once; what comes after
    the first is ignored, so that rows are written and the worker is ended. Main thread only."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
