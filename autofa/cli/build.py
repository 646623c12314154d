"""`autofa build`: compiles variants ahead of time, for any architecture, with no GPU."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click
from tabulate import tabulate

from autofa.cli.options import read_settings, split_names
from autofa.compiler.build import Build
from autofa.compiler.build import build as compile_variants
from autofa.device import Limits, cpu_limits, named_limits
from autofa.errors import UsageError, explain_bad
from autofa.kernels import REGISTRY
from autofa.kernels.catalog import listing
from autofa.kernels.family import KernelFamily, Variant

Request = tuple[Variant, str]


@dataclass(frozen=True)
class _Plan:
    requests: tuple[Request, ...]
    skipped: tuple[str, ...]


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
                if not found.legal:
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
    """Compile variants ahead of time and print what each uses."""
    settings = read_settings()
    names = split_names(arch)
    limits = [cpu_limits()] if names is None else [named_limits(name) for name in names]
    chosen = split_names(families)
    plan = _plan(
        REGISTRY.families if chosen is None else [REGISTRY.family(name) for name in chosen],
        limits,
        _head_dims(head_dim),
    )
    requests = [r for r in plan.requests if select is None or fnmatch.fnmatch(r[0].slug, select)]
    for line in plan.skipped:
        click.echo(f"skipped: {line}", err=True)
    if not requests:
        do = "`autofa kernels` shows what exists"
        raise UsageError(explain_bad("variants", select or arch or "none", "at least one", do))
    done = 0

    def show(result: Build) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            click.echo(f"\r[{done}/{len(requests[:limit])}] {result.variant.slug}", err=True)

    results = compile_variants(requests[:limit], settings, jobs=jobs, on_done=show)
    _print(results)
    failed = [r for r in results if r.status != "ok"]
    if failed:
        sys.exit(1 if len(failed) == len(results) else 3)


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
