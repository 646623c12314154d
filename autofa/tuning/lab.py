"""What a tune works with: one device, its worker and its compilers. Tests put a simulation here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autofa.bench.client import Entrant
from autofa.bench.protocol import Outcome, Plan, TimingRun
from autofa.device import DeviceKey, Limits
from autofa.kernels.family import Variant
from autofa.kernels.registry import Candidate
from autofa.problem import Problem
from autofa.store.rows import Provenance
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


@dataclass(frozen=True)
class Lab:
    """One device, ready to be measured.

    Attributes:
        today: what measurements are made with now; `created_at` and `details` are per row.
        fingerprint: `(variant, target)` -> of its source when it was first asked for.
        overlap: compilers may run while the measurer does; not on a CPU, whose cores are measured.
    """

    device: DeviceKey
    limits: Limits
    today: Provenance
    measurer: Measurer
    builder: Builder
    fingerprint: Callable[[Variant, str], str]
    overlap: bool
