"""Two made-up families for whole tunes on the simulated device: times, requests, rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tuning_simulation import DEVICE, Simulation, family, registry

from autofa.kernels import Registry
from autofa.problem import Problem, bucket_of, parse_shape
from autofa.store.ranking import rank
from autofa.store.repository import Repository
from autofa.store.rows import Row
from autofa.tuning.control import StopToken
from autofa.tuning.events import Event, Summary
from autofa.tuning.request import TuneRequest
from autofa.tuning.session import tune

FAST = family("sim.fast", {"m": (1, 2, 4), "n": (1, 2, 4, 8)}, illegal=lambda p: p.m * p.n > 16)
SLOW = family("sim.slow", {"m": (1, 2)})
REGISTRY = registry(FAST, SLOW)
PROBLEMS = tuple(
    parse_shape(f"1,8,{n},64", dtype="f32", mask=mask, device="cpu")
    for n in (128, 512, 1024)
    for mask in ("none", "causal")
)
BEST = "sim.fast-mx4-nx2"


def times(slug: str, problem: Problem) -> float:
    """`sim.fast` is 1.1x to 2x plain SDPA, best at m = 4, n = 2; all else is slower."""
    base = problem.flops * 1e-9
    if slug.startswith("sim.fast"):
        variant = REGISTRY.candidate(slug)
        return base / (2.0 - 0.2 * abs(variant.params.m - 4) - 0.1 * abs(variant.params.n - 2))
    return base * {"torch.sdpa": 1.0, "torch.flash": 1.02}.get(slug, 3.0)


def ask(db: str, problems: tuple[Problem, ...] = PROBLEMS[:1], **options: object) -> TuneRequest:
    return replace(TuneRequest(problems, "cpu", db, trials=12, registry=REGISTRY), **options)


def run(
    sim: Simulation,
    request: TuneRequest,
    on_event: Callable[[Event], None] = lambda event: None,
    token: StopToken | None = None,
) -> Summary:
    return tune(request, on_event, token=token, laboratory=sim.laboratory)


def stored(db: str, problem: Problem | None = None) -> list[Row]:
    with Repository.open(db, write=False) as repository:
        rows = repository.rows(device=DEVICE)
    return [row for row in rows if problem is None or row.problem == problem]


def winner(db: str, problem: Problem, candidates: Registry = REGISTRY) -> str:
    rows = [row for row in stored(db) if row.bucket == bucket_of(problem)]
    return rank(rows, "eager", candidates)[0].slug
