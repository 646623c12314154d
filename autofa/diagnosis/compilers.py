"""The compilers: which there are, whether they compile, and whether anything needs them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from autofa.compiler import default_jobs, find
from autofa.compiler.execute import find_ninja
from autofa.compiler.toolchain import ask
from autofa.compiler.trial import DO
from autofa.compiler.trial import problem as trial_problem
from autofa.device import DeviceKey, cpu_limits, limits_of
from autofa.diagnosis.finding import Finding, info, of_error, ok
from autofa.errors import ToolchainError, UsageError
from autofa.settings import Settings

TRIAL_SECONDS = 60.0


def _target(kind: str, devices: tuple[DeviceKey, ...]) -> str | None:
    """What is compiled for here; None where no own kernel runs."""
    if kind == "cpu":
        limits = cpu_limits()
        return limits.arch if limits.capability else None
    try:
        return next(limits_of(key).arch for key in devices if key.kind == "cuda")
    except (UsageError, StopIteration):
        return None


def compiler_findings(
    kind: str, settings: Settings, devices: tuple[DeviceKey, ...], needed: str
) -> Iterator[Finding]:
    """One compiler, tried on an empty file.

    Args:
        needed: why it must work; empty where nothing is to be compiled for that kind of device.
    """
    level = "problem" if needed else "info"
    try:
        toolchain = find(kind, settings)
        target = _target(kind, devices)
        failure = trial_problem(toolchain, target, settings, TRIAL_SECONDS) if target else None
    except ToolchainError as error:
        found = of_error("compilers", error, level)
    except OSError as error:
        said = f"no compiler can be tried: {error}"
        found = Finding("compilers", level, said, "see that TMPDIR is a folder with room in it")
    else:
        if failure is None:
            yield ok("compilers", str(toolchain))
            return
        found = Finding("compilers", level, failure, DO)
    why = f"{found.found} ({needed or 'nothing here needs it now'})"
    yield Finding(found.area, found.level, why, found.cure)


def ninja_findings(settings: Settings, needed: str) -> Iterator[Finding]:
    level = "problem" if needed else "info"
    try:
        path = find_ninja(settings)
        version = ask((path, "--version"), settings, "`pip install --force-reinstall ninja`")
    except ToolchainError as error:
        yield of_error("compilers", error, level)
    else:
        yield ok("compilers", f"ninja {version.strip()} ({path})")
    cores = len(os.sched_getaffinity(0))
    jobs = default_jobs(settings)
    yield info("compilers", f"{jobs} at once on {cores} cores, by MAX_JOBS, cores and free memory")
