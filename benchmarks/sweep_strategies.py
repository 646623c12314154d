"""The strategies that are compared: what a tune does, Optuna's samplers, and other simple ones."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import optuna
from numpy.typing import NDArray

from autofa.tuning.strategies import DEFAULT, Known, Point, Strategy, nearest_to_best, tpe

Numbers = NDArray[np.float64]


def leave_it(known: Known, chance: random.Random) -> Point | None:
    """All to the sampler."""
    return None


def uniform(seed: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.RandomSampler(seed=seed)


# Of the process below: how fast two values of a parameter become unlike, and which part of the cost
# is a sum over the parameters.
_UNLIKE = 0.7
_ADDITIVE = 0.7


def _like(a: Numbers, b: Numbers) -> Numbers:
    gap = np.exp(-_UNLIKE * np.abs(a[:, None, :] - b[None, :, :]))
    return _ADDITIVE * gap.mean(axis=2) + (1 - _ADDITIVE) * gap.prod(axis=2)


def interpolate(known: Known, chance: random.Random) -> Point | None:
    """The open point of the lowest confidence bound under a Gaussian process over the indices. What
    failed counts as the slowest, and what is running as what is expected of it."""
    good = [c for c in known.costs.values() if c is not None]
    if len(good) < 2:
        return nearest_to_best(known, chance)
    costs = np.array([max(good) if c is None else c for c in known.costs.values()])
    seen = np.array(list(known.costs), dtype=float)
    open_ = np.array(known.open, dtype=float)
    y = (costs - costs.mean()) / max(float(costs.std()), 0.02)
    if known.running:
        running = np.array(known.running, dtype=float)
        noisy = _like(seen, seen) + 0.01 * np.eye(len(seen))
        y = np.append(y, _like(running, seen) @ np.linalg.solve(noisy, y))
        seen = np.vstack([seen, running])
    inverse = np.linalg.inv(_like(seen, seen) + 0.01 * np.eye(len(seen)))
    across = _like(open_, seen)
    variance = np.maximum(1.0 - np.sum(across @ inverse * across, axis=1), 1e-9)
    return known.open[int(np.argmin(across @ inverse @ y - np.sqrt(variance)))]


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("random", leave_it, uniform),
        Strategy("tpe", leave_it, tpe),
        Strategy("tpe-4", leave_it, partial(tpe, n_startup_trials=4)),
        Strategy("tpe-univariate", leave_it, partial(tpe, multivariate=False)),
        Strategy("descent", nearest_to_best, tpe),
        Strategy("interpolate", interpolate, tpe),
        DEFAULT,
    )
}
