"""`autofa kernels`: the families, their parameters, constraints and legal counts."""

from __future__ import annotations

from dataclasses import dataclass

import click
from tabulate import tabulate

from autofa.cli.options import echo_json, format_option
from autofa.device import Limits, cpu_limits, named_limits
from autofa.kernels import REGISTRY
from autofa.kernels.catalog import Listing, listing
from autofa.kernels.family import KernelFamily
from autofa.runtime.presence import cuda_driver

# What variants are counted at: all head dims that `build` has took seconds per architecture.
HEAD_DIMS = (64, 128, 256, 512, 1024)
ARCHS = {"cuda": ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"), "cpu": ("x86-64-v3", "x86-64-v4")}


@dataclass(frozen=True)
class _Row:
    family: KernelFamily
    listings: tuple[tuple[str, Listing], ...]
    runs_here: bool


def _limits_here(kind: str) -> Limits | None:
    if kind == "cpu":
        return cpu_limits()
    if not cuda_driver():
        return None
    from autofa.runtime import devices

    return devices.limits(devices.find_device("cuda")) if devices.cuda_problem() is None else None


def _row(family: KernelFamily, named: Limits | None, here: Limits | None) -> _Row:
    archs = ARCHS[family.domain.device] if named is None else (named.arch,)
    dims = tuple(dim for dim in HEAD_DIMS if dim in family.domain.head_dims)

    def found(limits: Limits) -> Listing:
        return listing(family, limits, dims or None)

    return _Row(
        family,
        tuple((arch, found(named_limits(arch))) for arch in archs),
        here is not None and bool(found(here).points),
    )


@click.command()
@click.option(
    "--limits", "limits_name", metavar="NAME", help="A card (T4, RTX 3090), sm_86 or x86-64-v3."
)
@format_option(("simple", "github", "json"))
def kernels(limits_name: str | None, form: str) -> None:
    """The kernel families, their parameters, constraints and legal variants per architecture.

    Variants are counted over all dtypes and masks and, where a family serves them, head dims 64,
    128, 256, 512 and 1024. With --limits, only the families of that kind of device are shown.
    """
    named = named_limits(limits_name) if limits_name is not None else None
    kinds = ARCHS if named is None else (named.kind,)
    here = {kind: _limits_here(kind) for kind in ARCHS}
    rows = [
        _row(family, named, here[family.domain.device])
        for family in REGISTRY.families
        if family.domain.device in kinds
    ]
    if form == "json":
        echo_json([_as_json(row) for row in rows])
        return
    for row in rows:
        _print(row, form)
    click.echo("vendor kernels")
    machine = [limits for limits in here.values() if limits is not None]
    vendors = [
        (v.slug, v.library, v.version() or "", v.not_here(machine) or "yes", v.about)
        for v in REGISTRY.vendors
    ]
    heads = ("kernel", "library", "version", "runs on this machine", "what it is")
    click.echo(tabulate(vendors, heads, tablefmt=form, disable_numparse=True))


def _as_json(row: _Row) -> dict[str, object]:
    return {
        "name": row.family.name,
        "title": row.family.title,
        "params": [
            {"name": p.name, "values": list(p.values), "about": p.about} for p in row.family.params
        ],
        "constraints": [{"name": c.name, "reason": c.reason} for c in row.family.constraints],
        "counts": {a: {"legal": len(x.points), "total": x.total} for a, x in row.listings},
        "runs_here": row.runs_here,
    }


def _print(row: _Row, form: str) -> None:
    family = row.family
    here = "runs on this machine" if row.runs_here else "does not run on this machine"
    click.echo(f"{family.name}  {family.title}  ({here})")
    domain = family.domain
    masks = ", ".join(domain.masks)
    click.echo(f"  {', '.join(domain.dtypes)}; head dims {domain.head_dims}; masks {masks}")
    params = [(p.name, " ".join(map(str, p.values)), p.about) for p in family.params]
    click.echo(tabulate(params, ("parameter", "values", "what it is"), tablefmt=form))
    for constraint in family.constraints:
        click.echo(f"  constraint {constraint.name}: {constraint.reason}")
    counts = [(arch, len(found.points), found.total) for arch, found in row.listings]
    click.echo(tabulate(counts, ("architecture", "legal variants", "of"), tablefmt=form))
    for arch, found in row.listings:
        if not found.points:
            for reason, count in found.refused:
                click.echo(f"  {arch}: {count} points refused: {reason}")
    click.echo()
