"""`autofa bench`: the head-to-head of one shape."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from autofa.bench.protocol import Plan
from autofa.cli.options import default_dtype, device_option, mode_option, read_settings
from autofa.kernels import REGISTRY
from autofa.problem import Problem, check, parse_dtype
from autofa.reporting.leaderboard import leaderboard
from autofa.reporting.tables import Contender, document, fit, head_to_head
from autofa.store.ranking import CURRENT
from autofa.tuning.request import TuneRequest

if TYPE_CHECKING:
    from autofa.tuning.contest import Result

_FORMATS = ("simple", "csv", "json")


@click.command()
@click.option("--B", "batch", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--H", "heads", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--Hkv", "heads_kv", type=click.IntRange(min=1), help="Key heads (default: H).")
@click.option("--N", "seqlen", type=click.IntRange(min=1), default=8192, show_default=True)
@click.option("--Nk", "seqlen_k", type=click.IntRange(min=1), help="Key length (default: N).")
@click.option("--D", "head_dim", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--dtype", help="f32, f16 or bf16 (default: f16 on a GPU, f32 on a CPU).")
@click.option("--causal/--no-causal", default=False, help="Causal mask, upper-left as in torch.")
@click.option("--iters", type=click.IntRange(min=3), default=31, show_default=True, help="Rounds.")
@click.option("--check", "thorough", is_flag=True, help="Check odd inputs too, not this one only.")
@click.option("--sdpa", is_flag=True, help="Also SDPA and each of its backends.")
@click.option("--torch", "unfused", is_flag=True, help="Also the unfused form.")
@click.option("--show-all", is_flag=True, help="Also kernels that do not beat the best so far.")
@click.option("--kernels", "select", metavar="GLOB", help="Only kernels whose slug matches.")
@mode_option
@device_option()
@click.option("--format", "form", type=click.Choice(_FORMATS), default="simple")
def bench(
    batch: int,
    heads: int,
    heads_kv: int | None,
    seqlen: int,
    seqlen_k: int | None,
    head_dim: int,
    dtype: str | None,
    causal: bool,
    iters: int,
    thorough: bool,
    sdpa: bool,
    unfused: bool,
    show_all: bool,
    select: str | None,
    mode: str,
    device: str | None,
    form: str,
) -> None:
    """Build, check and time every kernel at one shape, side by side. Stores nothing."""
    settings = read_settings()
    problem = check(
        Problem(
            "f16" if dtype is None else parse_dtype(dtype),
            batch,
            heads,
            heads_kv or heads,
            seqlen,
            seqlen_k or seqlen,
            head_dim,
            head_dim,
            "causal" if causal else "none",
        )
    )
    from autofa.runtime import devices
    from autofa.tuning.contest import Field, contest, contestants
    from autofa.tuning.hardware import open_lab

    place = devices.find_device(device)
    problem = replace(
        problem, device=place.type, dtype=problem.dtype if dtype else default_dtype(place.type)
    )

    def on_step(text: str) -> None:
        if sys.stderr.isatty():
            click.echo(text, err=True)

    request = TuneRequest((problem,), str(place), db="", mode=mode, settings=settings)
    with open_lab(request) as lab:
        candidates = contestants(problem, lab, REGISTRY, Field(sdpa, unfused, select))
        plan = Plan(
            mode=mode,
            budget_s=60.0,
            screen_rounds=min(7, iters),
            min_rounds=iters,
            max_rounds=iters,
            finalists=len(candidates),
        )
        results = contest(problem, candidates, lab, plan, thorough=thorough, on_step=on_step)
    _print(results, mode, form, show_all=show_all, device=str(lab.device))
    if not any(r.row.status == "ok" for r in results):
        sys.exit(1)


def _contenders(results: list[Result], mode: str) -> list[Contender]:
    values = {r.row.slug: r.values for r in results}
    order = {r.row.slug: place for place, r in enumerate(results)}
    entries = leaderboard(
        [r.row for r in results], mode, REGISTRY, lambda row: CURRENT, everything=True
    )
    entries.sort(key=lambda entry: order[entry.kernel])
    return [Contender(entry, values[entry.kernel]) for entry in entries]


def _print(results: list[Result], mode: str, form: str, *, show_all: bool, device: str) -> None:
    contenders = _contenders(results, mode)
    documents = [document(c.entry) for c in contenders]
    if form == "json":
        click.echo(json.dumps(documents, indent=1, allow_nan=False))
    elif form == "csv":
        flat = [d | d.pop("bucket") for d in documents]  # type: ignore[operator]
        writer = csv.DictWriter(sys.stdout, list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)
    else:
        p = results[0].row.problem
        kind = "dense" if p.mask == "none" else p.mask
        click.echo(f"{device}: {p.shape} {p.dtype} {kind}, {mode}")
        text = head_to_head(contenders, mode=mode, show_all=show_all)
        click.echo(fit(text, sys.stdout.encoding), nl=False)
        hidden = len(contenders) - len(text.splitlines())
        if hidden:
            click.echo(f"{hidden} more did not beat the best before them, or failed: --show-all")
