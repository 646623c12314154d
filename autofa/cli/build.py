"""`autofa build`: compiles variants ahead of time, for any architecture, with no GPU."""

from __future__ import annotations

import fnmatch
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import click
from tabulate import tabulate

from autofa import compiler
from autofa.cli.options import duration, read_settings, split_names
from autofa.compiler.archs import Arch, resolve
from autofa.compiler.build import Build
from autofa.compiler.build import build as compile_variants
from autofa.device import Limits, cpu_limits
from autofa.errors import UsageError, explain_bad
from autofa.kernels import REGISTRY
from autofa.kernels.catalog import defaults, listing
from autofa.kernels.family import KernelFamily, Variant
from autofa.settings import Settings

Request = tuple[Variant, str]

# What one compilation took on one core (g++ 12, nvcc 13.0), for the estimate before the first.
_USUAL_SECONDS = {"cpu": 4.0, "cuda": 2.0}
# Where a line per variant would be too many: one for each of these shares or seconds.
_SHARE = 0.1
_SECONDS = 30.0


@dataclass(frozen=True)
class _Plan:
    requests: tuple[Request, ...]
    skipped: tuple[str, ...]


def _default_plan(limits: Sequence[Limits]) -> _Plan:
    """What calls of usual shapes get unmeasured."""
    requests: dict[Request, None] = {}
    skipped: list[str] = []
    for one in limits:
        found = [
            variant
            for family in REGISTRY.families
            if family.domain.device == one.kind
            for variant in defaults(family, one)
        ]
        requests.update(((variant, variant.target(one)), None) for variant in found)
        if not found:
            # Only what is asked for by name says why each family has none.
            skipped += _plan(REGISTRY.families, [one], None).skipped
    return _Plan(tuple(requests), tuple(skipped))


def _plan(
    families: Sequence[KernelFamily], limits: Sequence[Limits], head_dims: Sequence[int] | None
) -> _Plan:
    """What to compile, with targets; and each family x architecture x head dim with no variant."""
    requests: dict[Request, None] = {}
    skipped: list[str] = []
    for family in families:
        for one in limits:
            if family.domain.device != one.kind:
                continue
            for dim in head_dims or (None,):
                found = listing(family, one, None if dim is None else (dim,))
                requests.update(((v, v.target(one)), None) for v in found.legal)
                if not found.points:
                    at = f" at head dim {dim}" if dim is not None else ""
                    why = found.refused[0][0] if found.refused else "head dim not served"
                    skipped.append(f"{family.name} on {one.arch}{at}: {why}")
    return _Plan(tuple(requests), tuple(skipped))


def _head_dims(text: str | None) -> tuple[int, ...] | None:
    names = split_names(text)
    if names is None:
        return None
    if not all(name.isdigit() and int(name) > 0 for name in names):
        raise UsageError(explain_bad("--head-dim", text, "numbers >= 1", "for example 64,128"))
    return tuple(int(name) for name in names)


@click.command()
@click.option("--arch", metavar="sm_80,sm_90a", help="Architectures (default: this CPU's).")
@click.option("--families", metavar="NAME,...", help="Only these families (default: all).")
@click.option("--head-dim", metavar="D,...", help="Only these head dims.")
@click.option("--select", metavar="GLOB", help="Only variants whose slug matches.")
@click.option("--limit", type=click.IntRange(min=1), help="At most this many variants.")
@click.option("--jobs", type=click.IntRange(min=1), help="Parallel compilations.")
def build(
    arch: str | None,
    families: str | None,
    head_dim: str | None,
    select: str | None,
    limit: int | None,
    jobs: int | None,
) -> None:
    """Compile variants ahead of time and print what each uses.

    Without a selection: those that calls of usual shapes get unmeasured. With one: every legal
    variant that it leaves, which are thousands for most families.
    """
    settings = read_settings()
    names = split_names(arch)
    asked = [Arch(cpu_limits())] if names is None else [resolve(n, settings) for n in names]
    limits = [one.limits for one in asked if one.limits is not None]
    if not limits:
        raise UsageError(asked[0].note)
    for one in asked:
        if one.note:
            click.echo(f"{'note' if one.limits else 'skipped'}: {one.note}", err=True)
    chosen = split_names(families)
    dims = _head_dims(head_dim)
    if (chosen, dims, select, limit) == (None, None, None, None):
        plan = _default_plan(limits)
    else:
        own = REGISTRY.families if chosen is None else [REGISTRY.family(name) for name in chosen]
        plan = _plan(own, limits, dims)
    requests = [r for r in plan.requests if select is None or fnmatch.fnmatch(r[0].slug, select)]
    for line in plan.skipped:
        click.echo(f"skipped: {line}", err=True)
    if not requests:
        do = "`autofa kernels` shows what exists"
        raise UsageError(explain_bad("variants", select or arch or "none", "at least one", do))
    requests = requests[:limit]
    progress = _Progress(requests, settings, jobs)
    results = compile_variants(requests, settings, jobs=jobs, on_done=progress.show)
    progress.end()
    _print(results)
    failed = [r for r in results if r.status != "ok"]
    if failed or len(limits) < len(asked):
        sys.exit(1 if len(failed) == len(results) else 3)


class _Progress:
    """What a build says while it runs: the last variant on a terminal, a line at times elsewhere.

    Args:
        now: the clock.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        settings: Settings,
        jobs: int | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        missing = [r for r in requests if compiler.library_of(*r, settings) is None]
        seconds = sum(_USUAL_SECONDS[variant.family.domain.device] for variant, _ in missing)
        self._all = len(requests)
        self._missing = len(missing)
        self._done = 0
        self._compiled = 0
        self._now = now
        self._live = sys.stderr.isatty()
        kinds = {variant.family.domain.device for variant, _ in missing}
        parallel = jobs or min((compiler.default_jobs(settings, k) for k in kinds), default=1)
        if missing:
            about = duration(seconds / min(parallel, len(missing)))
            text = f"about {about} with {parallel} at once"
            click.echo(f"{self._all} variants, {self._missing} to compile: {text}", err=True)
        self._began = self._told = now()
        self._told_at = 0

    def show(self, result: Build) -> None:
        """Takes the next result."""
        self._done += 1
        self._compiled += not result.cached
        at = f"[{self._done}/{self._all}]"
        if self._live:
            click.echo(f"\r\x1b[K{at} {result.variant.slug}", err=True, nl=False)
            return
        now = self._now()
        enough = self._done - self._told_at >= _SHARE * self._all
        if self._compiled and (now - self._told >= _SECONDS or (enough and now > self._told)):
            self._told, self._told_at = now, self._done
            took = (now - self._began) / self._compiled
            left = duration(took * max(0, self._missing - self._compiled))
            click.echo(f"{at} about {left} left", err=True)

    def end(self) -> None:
        if self._live:
            click.echo("\r\x1b[K", err=True, nl=False)


def _print(results: Sequence[Build]) -> None:
    def row(result: Build) -> tuple[object, ...]:
        usage = result.usage
        numbers = (usage.registers, usage.smem_bytes, usage.spill_bytes) if usage else ("", "", "")
        state = "cached" if result.cached else result.status
        return (result.variant.slug, result.target, state, f"{result.seconds:.2f}", *numbers)

    heads = ("variant", "target", "status", "seconds", "registers", "smem", "spills")
    click.echo(tabulate([row(r) for r in results], heads))
    for result in results:
        if result.status != "ok":
            click.echo(f"{result.variant.slug}: {result.status}: {result.message}", err=True)
    compiled = sum(r.status == "ok" and not r.cached for r in results)
    cached = sum(r.cached for r in results)
    failed = sum(r.status != "ok" for r in results)
    click.echo(f"{compiled} compiled, {cached} already there, {failed} failed", err=True)
