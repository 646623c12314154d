"""What a tune works with: one device, its worker and its compilers. Tests put a simulation here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Protocol

from autofa.bench.client import Entrant
from autofa.bench.protocol import Outcome, Plan, TimingRun
from autofa.device import DeviceKey, Limits
from autofa.kernels.family import Variant
from autofa.kernels.registry import Candidate
from autofa.problem import Problem
from autofa.store.rows import Provenance, Row
from autofa.tuning.building import Builder


class Measurer(Protocol):
    """`autofa.bench.client.Worker`, or what stands in for it."""

    def check(
        self,
        candidate: Candidate,
        library: Path | None,
        problem: Problem,
        *,
        thorough: bool = True,
        poll: Callable[[], None] = ...,
    ) -> Outcome: ...

    def time(
        self,
        entrants: Sequence[Entrant],
        problem: Problem,
        plan: Plan | None = None,
        *,
        poll: Callable[[], None] = ...,
    ) -> TimingRun: ...

    def close(self) -> None: ...


class Clock:
    """When new rows are made: after every row of the device that is there already, though the
    wall clock was put back since. The newest row of a kernel is what counts. Not thread-safe."""

    def __init__(self) -> None:
        self._last = ""

    def saw(self, rows: Iterable[Row]) -> None:
        """Rows that are there already."""
        self._last = max((self._last, *(row.provenance.created_at for row in rows)))

    def now(self) -> str:
        """UTC in ISO 8601; never the same twice."""
        time = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        if time <= self._last:
            # A row that no clock made, of the 39th or the year 9999, has nothing later than it.
            with suppress(ValueError, OverflowError):
                time = self._after(time)
        self._last = max(self._last, time)
        return time

    def _after(self, form: str) -> str:
        """The next time, in a text of that form: texts are what is compared, so one that is written
        otherwise is passed by a second."""
        whole, _, fraction = self._last.rstrip("Z").partition("+")[0].partition(".")
        last = datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}+00:00")
        same_form = len(self._last) == len(form) and self._last.endswith("+00:00")
        step = timedelta(microseconds=1) if same_form else timedelta(seconds=1)
        return (last + step).isoformat(timespec="microseconds")


@dataclass(frozen=True)
class Lab:
    """One device, ready to be measured.

    Attributes:
        today: what measurements are made with now; `created_at` and `details` are per row.
        fingerprint: `(variant, target)` -> of its source when it was first asked for.
        clock: of the rows made here.
        overlap: compilers may run while the measurer does; not on a CPU, whose cores are measured.
    """

    device: DeviceKey
    limits: Limits
    today: Provenance
    measurer: Measurer
    builder: Builder
    fingerprint: Callable[[Variant, str], str]
    overlap: bool
    clock: Clock = field(default_factory=Clock)
