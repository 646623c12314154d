"""What a tune works with: one device, its worker and its compilers. Tests put a simulation here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autofa import compiler
from autofa.bench import environment
from autofa.bench.client import Entrant, Worker
from autofa.bench.protocol import Outcome, Plan, TimingRun
from autofa.device import DeviceKey, Limits
from autofa.errors import ToolchainError
from autofa.kernels.family import Variant
from autofa.kernels.registry import Candidate
from autofa.problem import Problem
from autofa.runtime import devices
from autofa.store.rows import Provenance
from autofa.tuning.building import Builder
from autofa.tuning.request import TuneRequest

# Cores that compilers leave to the worker while it measures call times on a GPU's host.
_SPARE_CORES = 2


class Measurer(Protocol):
    """`autofa.bench.client.Worker`, or what stands in for it."""

    def check(self, candidate: Candidate, library: Path | None, problem: Problem) -> Outcome: ...

    def time(
        self, entrants: Sequence[Entrant], problem: Problem, plan: Plan | None = None
    ) -> TimingRun: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Lab:
    """One device, ready to be measured.

    Attributes:
        today: what measurements are made with now; `created_at` and `details` are per row.
        overlap: compilers may run while the measurer does; not on a CPU, whose cores are measured.
    """

    device: DeviceKey
    limits: Limits
    today: Provenance
    measurer: Measurer
    builder: Builder
    fingerprint: Callable[[Variant, str], str]
    overlap: bool


def open_lab(request: TuneRequest) -> AbstractContextManager[Lab]:
    """The real thing. The worker starts with its first use, and ends with the context.

    Raises:
        DeviceError: the device is not there.
    """
    return _open(request)


@contextmanager
def _open(request: TuneRequest) -> Iterator[Lab]:
    device = devices.find_device(request.device)
    limits = devices.limits(device)
    kind = limits.kind
    jobs = request.jobs
    if jobs is None and kind == "cuda":
        spared = max(1, len(os.sched_getaffinity(0)) - _SPARE_CORES)
        jobs = min(compiler.default_jobs(request.settings, kind), spared)
    builder = Builder(limits, request.settings, jobs)
    try:
        version = compiler.find(kind, request.settings).version
    except ToolchainError as error:
        version = ""
        builder.problem = str(error)
    worker = Worker(str(device), limits)
    try:
        yield Lab(
            device=devices.device_key(device),
            limits=limits,
            today=environment.provenance(device, version),
            measurer=worker,
            builder=builder,
            fingerprint=compiler.fingerprint,
            overlap=kind == "cuda",
        )
    finally:
        worker.close()
