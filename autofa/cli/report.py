"""`autofa report`: the leaderboard of a device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autofa import compiler
from autofa._version import __version__
from autofa.cli.options import database_of, db_option, format_option, mode_option, read_settings
from autofa.device import DeviceKey, cpu_key
from autofa.errors import StoreUnwritableError, ToolchainError, UsageError, explain_bad
from autofa.kernels import REGISTRY
from autofa.problem import MASKS, Problem, bucket_of, parse_shape
from autofa.reporting.leaderboard import leaderboard, stale_count
from autofa.reporting.tables import NOTHING, fit, render
from autofa.runtime.presence import cuda_driver, torch_version
from autofa.settings import Settings
from autofa.store.ranking import validity
from autofa.store.repository import Repository
from autofa.store.rows import Provenance, Row

if TYPE_CHECKING:
    from autofa.reporting.regret import Regret


def _chosen(named: str | None, stored: list[DeviceKey]) -> list[DeviceKey]:
    """The devices to report: all of that name, or this machine's GPU and its CPU, the latter with
    any number of threads."""
    if named is not None:
        found = [key for key in stored if named in (key.name, str(key))]
        if not found and stored:
            names = ", ".join(sorted({key.name for key in stored}))
            raise UsageError(explain_bad("--device", named, names, "name one of these"))
        return found
    # A CPU by its model: how many threads torch would use now only torch knows.
    cpu = replace(cpu_key(1), units=0)
    here = [key for key in stored if replace(key, units=0) == cpu]
    if any(key.kind == "cuda" for key in stored) and cuda_driver():
        from autofa.runtime import devices

        place = devices.find_device(None)
        if place.type == "cuda" and devices.device_key(place) in stored:
            here.insert(0, devices.device_key(place))
    return here


def _today(key: DeviceKey, settings: Settings) -> Provenance | None:
    """What a measurement made now would be made with, as far as it is compared; None for a device
    that is not here."""
    driver = ""
    if key.kind == "cpu":
        if replace(key, units=1) != cpu_key(1):
            return None
    else:
        if not cuda_driver():
            return None
        from autofa.bench.environment import provenance
        from autofa.runtime import devices

        place = devices.find_device(None)
        if devices.device_key(place) != key:
            return None
        driver = provenance(place, "").driver
    try:
        version = compiler.find(key.kind, settings).version
    except ToolchainError:
        version = ""
    return Provenance(__version__, torch_version(), "", driver, version, "", "")


def _judge(today: Provenance | None) -> Callable[[Row], str]:
    """`validity` by today's kernels. Machines of one kind, and tunes again, leave many rows that
    differ in nothing that it looks at: asked once for all, a report of 50,000 rows takes 3.0 s of
    a core in place of 5.7."""
    fingerprint = cache(compiler.fingerprint)
    known: dict[tuple[object, ...], str] = {}

    def answer(row: Row) -> str:
        made = row.provenance
        versions = (made.torch, made.driver, made.compiler)
        key = (row.device, row.problem, row.slug, row.fingerprint, *versions)
        found = known.get(key)
        if found is None:
            found = known[key] = validity(row, REGISTRY, fingerprint, today)
        return found

    return answer


def _problems(shape: str | None, kind: str) -> list[Problem]:
    if shape is None:
        return []
    return [
        parse_shape(shape, dtype=dtype, mask=mask, device=kind)
        for dtype in ("f32", "f16", "bf16")
        for mask in MASKS
    ]


@click.command()
@click.option("--device", metavar="NAME", help="A device of the database (default: this machine).")
@click.option("--shape", metavar="B,H,N,D", help="Only this shape's bucket.")
@mode_option
@click.option("--top", type=click.IntRange(min=1), help="At most this many kernels per shape.")
@click.option("--all", "everything", is_flag=True, help="Failed and outdated measurements too.")
@click.option(
    "--regret", is_flag=True, help="What not tuning costs: each bucket chosen for without its rows."
)
@format_option()
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write it there.")
@db_option
def report(
    device: str | None,
    shape: str | None,
    mode: str,
    top: int | None,
    everything: bool,
    regret: bool,
    form: str,
    output: Path | None,
    db: str | None,
) -> None:
    """Print the leaderboard: per shape, every kernel measured, best first."""
    settings = read_settings()
    _problems(shape, "cpu")  # a malformed shape is found before the database is opened
    if regret and (top is not None or everything):
        got = "--top" if top is not None else "--all"
        do = "leave it out: choices are compared, no kernels listed"
        good = "--device, --shape, --mode, --format, --output, --db"
        raise UsageError(explain_bad("option beside --regret", got, good, do))
    entries = []
    stale = known = 0
    losses: list[Regret] = []
    with Repository.open(database_of(settings, db), write=False) as repository:
        for key in _chosen(device, repository.devices()):
            rows = repository.rows(device=key)
            known += len(rows)
            holds = _judge(_today(key, settings))
            if regret:
                from autofa.reporting.regret import regrets

                buckets = [bucket_of(problem) for problem in _problems(shape, key.kind)]
                losses += regrets(rows, mode, REGISTRY, holds, buckets)
                continue
            entries += leaderboard(
                rows,
                mode,
                REGISTRY,
                holds,
                top=top,
                everything=everything,
                problems=_problems(shape, key.kind),
            )
            stale += 0 if everything else stale_count(rows, holds)
    if regret:
        from autofa.reporting.regret import render_regret

        text = render_regret(losses, form)
    else:
        nothing = NOTHING
        if shape is not None and known:
            nothing = f"Nothing tuned of that shape: run `autofa tune --shape {shape}`."
        text = render(entries, form, mode=mode, nothing=nothing, stale=stale)
    if output is None:
        click.echo(fit(text, sys.stdout.encoding), nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        do = f"name another file ({error.strerror})"
        raise StoreUnwritableError(
            explain_bad("--output", str(output), "a writable file", do)
        ) from None
