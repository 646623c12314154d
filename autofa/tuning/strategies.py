"""Which point of a family's space to try next, as far as that is not left to Optuna's samplers.

Compared on recorded sweeps by `benchmarks/sweep.py replay`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optuna

# So many trials the descent has for itself: more than most families get for one problem.
_ALONE = 16

# The index of each parameter's value in its declared order.
Point = tuple[int, ...]


@dataclass(frozen=True)
class Known:
    """What a search knows when it chooses.

    Attributes:
        costs: log of the time over plain SDPA's of what was measured; None for what failed.
        running: asked for, not measured yet.
        open: legal and not asked for; never empty.
    """

    costs: Mapping[Point, float | None]
    running: Sequence[Point]
    open: Sequence[Point]


Choose = Callable[[Known, random.Random], "Point | None"]


@dataclass(frozen=True)
class Strategy:
    """How one family's space is searched.

    Attributes:
        choose: the next point; None leaves it to the sampler.
        sampler: seed -> Optuna's sampler.
    """

    name: str
    choose: Choose
    sampler: Callable[[int], optuna.samplers.BaseSampler]


def steps_between(a: Point, b: Point) -> tuple[int, int, int]:
    """From `b` to `a`: how many parameters differ, by how many values in all, and how far down."""
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    return sum(gap != 0 for gap in gaps), sum(map(abs, gaps)), -sum(gaps)


def nearest_to_best(known: Known, chance: random.Random) -> Point | None:
    """The open point nearest to the best one: one parameter away before two, by the fewest values,
    and rather up than down. So a descent that never ends in a local optimum. What is running stands
    in as long as nothing is measured."""
    good = [(cost, point) for point, cost in known.costs.items() if cost is not None]
    if not good and not known.running:
        return None
    best = min(good)[1] if good else known.running[0]
    least = min(steps_between(p, best) for p in known.open)
    return chance.choice([p for p in known.open if steps_between(p, best) == least])


def nearest_then_sampler(known: Known, chance: random.Random) -> Point | None:
    """The nearest alone at first, then every third time: where parameters only help together, a
    descent is slow."""
    asked = len(known.costs) + len(known.running)
    return None if asked >= _ALONE and asked % 3 else nearest_to_best(known, chance)


def tpe(seed: int, **options: object) -> optuna.samplers.BaseSampler:
    """TPE with the settings of this project."""
    import optuna

    # v5 makes these the defaults; stated, so that another default changes nothing here.
    settled = {"n_startup_trials": 8, "multivariate": True, "constant_liar": True, **options}
    return optuna.samplers.TPESampler(seed=seed, **settled)  # type: ignore[arg-type]


# Compared by `benchmarks/sweep.py replay`; benchmarks/sweeps/README.md has the table.
# TPE begins with points by chance: knowing only where the descent went, it would stay there.
DEFAULT = Strategy("nearest", nearest_then_sampler, partial(tpe, n_startup_trials=2 * _ALONE))
