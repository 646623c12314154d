"""The lab of a real device: its worker process, its compilers, its identity."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from autofa import compiler
from autofa.bench import environment
from autofa.bench.client import Worker, WorkerOptions
from autofa.compiler.toolchain import VERSION_SECONDS
from autofa.errors import ToolchainError
from autofa.runtime import devices
from autofa.tuning.building import Builder
from autofa.tuning.lab import Lab
from autofa.tuning.request import TuneRequest

# Cores that compilers leave to the worker while it measures call times on a GPU's host.
_SPARE_CORES = 2


def _patience(request: TuneRequest) -> float:
    """Seconds that the compiler may take to answer at all."""
    if request.budget_s is None:
        return VERSION_SECONDS
    return min(VERSION_SECONDS, max(2.0, request.budget_s / 4))


def compilers_beside(request: TuneRequest, workers: int = 1) -> int:
    """How many compilers of all run beside so many workers that measure GPUs: as many as the
    request says, else as there is room for."""
    if request.jobs is not None:
        return request.jobs
    spared = max(1, len(os.sched_getaffinity(0)) - _SPARE_CORES * workers)
    return min(compiler.default_jobs(request.settings, "cuda"), spared)


@contextmanager
def open_lab(request: TuneRequest, options: WorkerOptions | None = None) -> Iterator[Lab]:
    """The real thing. The worker starts with its first use, and ends with the context.

    Args:
        options: time and memory limits of the worker.

    Raises:
        DeviceError: the device is not there.
    """
    device = devices.find_device(request.device)
    limits = devices.limits(device)
    kind = limits.kind
    jobs = compilers_beside(request) if kind == "cuda" else request.jobs
    builder = Builder(limits, request.settings, jobs)
    try:
        version = compiler.find(kind, request.settings, _patience(request)).version
    except ToolchainError as error:
        version = ""
        builder.problem = str(error)
    worker = Worker(str(device), limits, options)
    try:
        yield Lab(
            device=devices.device_key(device),
            limits=limits,
            today=environment.provenance(device, version),
            measurer=worker,
            builder=builder,
            fingerprint=cache(compiler.fingerprint),
            overlap=kind == "cuda",
        )
    finally:
        worker.close()
