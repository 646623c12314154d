"""Everything that `autofa doctor` looks at, in the order in which one thing explains the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields

from autofa._version import __version__
from autofa.diagnosis import machine as machine_module
from autofa.diagnosis.compilers import TRIAL_SECONDS, compiler_findings, ninja_findings
from autofa.diagnosis.finding import Finding, examine, info, of_error, ok, problem, silence
from autofa.diagnosis.libraries import READ_SECONDS, cache_findings, prebuilt_findings
from autofa.diagnosis.machine import Machine, gpu_findings, torch_findings
from autofa.diagnosis.measurements import Measured, Standing, read, standing, standing_findings
from autofa.kernels import REGISTRY
from autofa.settings import Settings, load_usable, without_secrets

# What one look may take. A server that does not answer is given up after 5 s, a hung compiler
# after 20; all of these are there only in case something hangs that has no limit of its own.
_SECONDS = 60.0


def checkup() -> tuple[Finding, ...]:
    """Looks at all of it. Never raises; writes nothing but temporary files, which it removes."""
    with silence():
        return tuple(_checkup())


def _checkup() -> Iterator[Finding]:
    settings, complaints = load_usable()
    yield ok("settings", f"autofa {__version__}, Python {sys.version.split()[0]}")
    for complaint in complaints:
        yield of_error("settings", complaint)
    yield from settings_findings(settings)
    machine = machine_module.look()
    yield from examine("torch", lambda: torch_findings(machine), _SECONDS)
    yield from examine("gpu", lambda: gpu_findings(machine), _SECONDS)

    measured: list[Measured] = []
    standings: list[Standing] = []

    def database() -> Iterator[Finding]:
        measured.append(read(settings, machine.devices))
        yield from measured[0].findings

    def kernels() -> Iterator[Finding]:
        rows = (measured[0].rows if measured else None) or ()
        for device in dict.fromkeys(machine.devices):
            standings.append(standing(device, rows, settings))
            yield from standing_findings(standings[-1])
        yield from prebuilt_findings()

    yield from examine("database", database, _SECONDS)
    yield from examine("kernels", kernels, _SECONDS)
    needs = {kind: _need(kind, machine, standings) for kind in ("cpu", "cuda")}
    needed = needs["cpu"] or needs["cuda"]
    for kind in ("cpu", "cuda"):

        def compilers(kind: str = kind) -> Iterator[Finding]:
            return compiler_findings(kind, settings, machine.devices, needs[kind])

        yield from examine("compilers", compilers, _SECONDS + TRIAL_SECONDS)
    yield from examine("compilers", lambda: ninja_findings(settings, needed), _SECONDS)
    yield from examine("cache", lambda: cache_findings(settings, needed), _SECONDS + READ_SECONDS)
    yield from examine("vendors", lambda: vendor_findings(machine), _SECONDS)


def _need(kind: str, machine: Machine, standings: list[Standing]) -> str:
    """Why that compiler must work; empty where all that could be compiled is there."""
    if kind not in machine.kinds():
        return ""
    found = [s.to_build for s in standings if s.device.kind == kind]
    if kind == "cpu" and "cuda" in machine.kinds():
        found = [s.to_build for s in standings if s.device.kind == kind and s.missing]
    return next(filter(None, found), "")


def settings_findings(settings: Settings) -> Iterator[Finding]:
    """What is set, and what of it keeps autofa from its work."""
    unset = Settings()
    shown = []
    for name in (field.name for field in fields(settings)):
        value = getattr(settings, name)
        if name != "search_path" and value != getattr(unset, name):
            text = " ".join(value) if isinstance(value, tuple) else str(value)
            shown.append(f"{name}={without_secrets(text)}")
    if shown:
        yield info("settings", f"set by the environment: {', '.join(shown)}")
    if settings.disable:
        cure = "unset AUTOFA_DISABLE"
        yield problem("settings", "autofa is switched off: every call is plain SDPA", cure)
    if settings.force_kernel is not None:
        cure = "unset AUTOFA_FORCE_KERNEL, which is for tests"
        if REGISTRY.find(settings.force_kernel) is None:
            told = f"no kernel is called {settings.force_kernel!r}: every call raises"
        else:
            told = f"every call must use {settings.force_kernel}, or raises"
        yield problem("settings", told, cure)


def vendor_findings(machine: Machine) -> Iterator[Finding]:
    """Kernels of other libraries than torch, which count where they are installed."""
    for library in sorted({kernel.library for kernel in REGISTRY.vendors} - {"torch"}):
        kernels = [kernel for kernel in REGISTRY.vendors if kernel.library == library]
        version = kernels[0].version()
        slugs = ", ".join(kernel.slug for kernel in kernels)
        failed = [why for slug, why in machine.unusable if slug in slugs.split(", ")]
        if version is None:
            yield info("vendors", f"{library} is not installed, so {slugs} cannot be tried")
        elif failed:
            cure = f"install a {library} that fits this torch and this GPU, or uninstall it"
            yield problem("vendors", f"{library} {version} cannot be used: {failed[0]}", cure)
        else:
            yield ok("vendors", f"{library} {version}: {slugs}")
