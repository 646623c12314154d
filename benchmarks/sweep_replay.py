"""Search strategies against recorded sweeps, through `autofa.tuning.search` as a tune uses it."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sweep_files import Sweep
from sweep_strategies import STRATEGIES
from tabulate import tabulate

from autofa.kernels.family import Variant
from autofa.problem import bucket_of
from autofa.tuning.hints import PER_FAMILY, distance
from autofa.tuning.search import FamilySearch
from autofa.tuning.strategies import Strategy

# Points slower than this over the best are no fair part of a budget that is a share of the space.
_HOPELESS = math.log(5)
_SHARE = 0.25
_MOST = 40
_AT = (10, 20, 40)


@dataclass(frozen=True)
class Arena:
    """One recording as something to search.

    Attributes:
        legal: the points that may be asked for, the default first.
        trials: the budget T: a quarter of the points within 5x of the best, at most 40.
        blind: the search begins at a point by chance, as if there were no good default.
    """

    name: str
    sweep: Sweep
    legal: tuple[Variant, ...]
    best: float
    trials: int
    blind: bool = False

    def cost(self, variant: Variant) -> float | None:
        return self.sweep.costs[variant.slug]


def arena(name: str, sweep: Sweep, *, declared: bool) -> Arena | None:
    """A complete recording as an arena; `declared` leaves only what a default tune searches: no
    lifted constraint, sums in f32."""
    variants = sweep.space.variants(sweep.limits)
    if declared:
        own = {v.slug for v in sweep.space.origin.legal(sweep.space.problem, sweep.limits)}
        variants = [v for v in variants if v.slug in own and v.accuracy(sweep.space.dtype) == "f32"]
    variants = [v for v in variants if v.slug in sweep.costs]
    costs = [c for v in variants if (c := sweep.costs[v.slug]) is not None]
    if not costs:
        return None
    best = min(costs)
    fair = sum(c <= best + _HOPELESS for c in costs)
    return Arena(name, sweep, tuple(variants), best, min(_MOST, math.ceil(_SHARE * fair)))


def curve(
    field: Arena, strategy: Strategy, seed: int, trials: int, batch: int, hints: Sequence[Variant]
) -> list[float]:
    """The fraction of the optimum that is reached after each trial; a failed one counts too."""
    legal = list(field.legal)
    if field.blind:
        random.Random(seed).shuffle(legal)
    search = FamilySearch(
        field.sweep.space.declared,
        legal,
        hints,
        trials=0,  # a space smaller than the trials would be walked
        seed=seed,
        strategy=strategy,
    )
    reached: list[float] = []
    best = math.inf
    while len(reached) < trials and search.remaining and best > field.best:
        count = min(batch, trials - len(reached), search.remaining)
        asked = [v for _ in range(count) if (v := search.ask()) is not None]
        for variant in asked:
            cost = field.cost(variant)
            search.tell(variant, cost)
            best = min(best, math.inf if cost is None else cost)
            reached.append(math.exp(field.best - best))
    return reached + reached[-1:] * (trials - len(reached))


@dataclass(frozen=True)
class Replay:
    """Curves of one strategy: per arena, per seed."""

    strategy: str
    curves: Mapping[str, list[list[float]]]

    def at(self, arenas: Sequence[Arena], trials: int | None) -> list[float]:
        """Fractions after so many trials, or at each arena's own budget, over arenas and seeds."""
        return [
            one[min(trials or field.trials, len(one)) - 1]
            for field in arenas
            for one in self.curves[field.name]
        ]


def warm(field: Arena, others: Sequence[Arena]) -> list[Variant]:
    """The best variants of the same family in other recordings of its device, the nearest bucket's
    first, at most as many as a tune takes from its neighbours."""
    problem = field.sweep.space.problem
    family = field.sweep.space.declared
    near = sorted(
        (
            distance(bucket_of(other.sweep.space.problem), bucket_of(problem)),
            other.name,
            min(other.legal, key=lambda v: math.inf if other.cost(v) is None else other.cost(v)),
        )
        for other in others
        if other.name != field.name
        and (other.sweep.space.family, other.sweep.device) == (family.name, field.sweep.device)
    )
    names = [param.name for param in family.params]
    found = [family.variant(dict(zip(names, v.values, strict=True)), problem) for _, _, v in near]
    return list(dict.fromkeys(found))[:PER_FAMILY]


def _curves(
    field: Arena, name: str, seeds: int, batch: int, hints: Sequence[Variant]
) -> list[list[float]]:
    trials = min(max(_AT), len(field.legal))
    return [curve(field, STRATEGIES[name], seed, trials, batch, hints) for seed in range(seeds)]


_SHARED: list[tuple[Arena, str, int, int, Sequence[Variant]]] = []


def _task(index: int) -> list[list[float]]:
    return _curves(*_SHARED[index])


def replay(
    arenas: Sequence[Arena],
    names: Sequence[str],
    seeds: int,
    batch: int,
    hints: Mapping[str, Sequence[Variant]],
) -> list[Replay]:
    """Every strategy on every recording, on all cores."""
    # Declarations hold functions, which do not travel between processes: these are forked.
    tasks = [(field, name) for name in names for field in arenas]
    _SHARED[:] = [(f, name, seeds, batch, hints.get(f.name, ())) for f, name in tasks]
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(_task, range(len(tasks)), 1)
    curves = {(name, field.name): one for (field, name), one in zip(tasks, found, strict=True)}
    return [Replay(name, {f.name: curves[name, f.name] for f in arenas}) for name in names]


def _low(values: Sequence[float]) -> float:
    """The 10th percentile."""
    ordered = sorted(values)
    return ordered[int(0.1 * (len(ordered) - 1))]


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({_low(values):.3f})"


def table(replays: Sequence[Replay], arenas: Sequence[Arena]) -> str:
    """Median (10th percentile) of the fraction of the optimum, per strategy."""
    rows = []
    chance = next((r for r in replays if r.strategy == "random"), None)
    for each in replays:
        quarter = [
            one[max(0, math.ceil(len(field.legal) / 4) - 1)]
            for field in arenas
            for one in each.curves[field.name]
        ]
        cells = [_cell(each.at(arenas, count)) for count in _AT]
        wins = "-" if chance is None else f"{beats(each, chance, arenas):.0%}"
        rows.append([each.strategy, *cells, _cell(quarter), _cell(each.at(arenas, None)), wins])
    heads = ("strategy", *(f"{n} trials" for n in _AT), "25%", "T", "beats random at T")
    return tabulate(rows, heads, tablefmt="github")


def beats(one: Replay, other: Replay, arenas: Sequence[Arena]) -> float:
    """The share of arenas where its mean over the seeds at T is higher, or both are at the top."""
    won = 0
    for field in arenas:
        mine, theirs = (statistics.mean(r.at([field], None)) for r in (one, other))
        won += mine > theirs or mine > 0.9999
    return won / len(arenas)


def verdict(replays: Sequence[Replay], train: Sequence[Arena], test: Sequence[Arena]) -> str:
    """The strategy that is best on one half of the recordings, and what it reaches on the other."""
    chosen = max(replays, key=lambda r: statistics.mean(r.at(train, None)))
    chance = next((r for r in replays if r.strategy == "random"), None)
    wins = "-" if chance is None else f"{beats(chosen, chance, test):.0%}"
    reached = chosen.at(test, None)
    return (
        f"chosen: {chosen.strategy}; on the other half at T median {statistics.median(reached):.3f}"
        f", 10th percentile {_low(reached):.3f}, beats random in {wins}"
    )


def details(replays: Sequence[Replay], arenas: Sequence[Arena]) -> str:
    """Per recording: its points, its budget T, the default's place, and each strategy at T."""
    rows = []
    for field in arenas:
        default = field.cost(field.legal[0])
        start = 0.0 if default is None else math.exp(field.best - default)
        cells = [_cell(each.at([field], None)) for each in replays]
        rows.append([field.name, len(field.legal), field.trials, f"{start:.3f}", *cells])
    heads = ("recording", "points", "T", "default", *(each.strategy for each in replays))
    return tabulate(rows, heads, tablefmt="github")
