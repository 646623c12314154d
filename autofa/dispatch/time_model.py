"""How long plain SDPA takes where it was not measured. Pure: no torch, no numpy.

Its law has three terms, fitted to this device's rows of it in the nearest buckets:

    device time = launch + compute * work + memory * bytes          (all three at least 0)

`work` counts the multiply-adds of whole tiles on the unit that has most of them, so padding, waves
and tails are in it. By how much the law misses the buckets that it is fitted to corrects, the
nearest first, what it says of others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autofa.device import Limits
from autofa.problem import Problem
from autofa.store.rows import Row

Terms = tuple[float, float, float]

# Rows and keys of a tile.
_TILE = {"cuda": (128, 128), "cpu": (16, 64)}


def terms(problem: Problem, limits: Limits) -> Terms:
    """What the coefficients are multiplied by: 1, work (1e12), bytes (1e9).

    Work is that of the unit with the most tiles, times the units. How many tiles a unit holds at
    once does not matter: counting waves of units x resident tiles instead doubled the errors of
    laws on an H200, since what is resident shares the unit.
    """
    p = problem
    rows, keys = _TILE[p.device]
    units = max(1, limits.units)
    tiles = p.batch * p.heads_q * -(-p.seqlen_q // rows)
    padded = -(-tiles // units) * units * rows
    width = float(-(-p.seqlen_k // keys) * keys)
    if p.causal:
        # Keys that a row sees, on average, and half a tile for the one that the diagonal cuts.
        seen = p.seqlen_k / 2 if p.seqlen_q >= p.seqlen_k else p.seqlen_q / 2
        if p.mask == "causal" and p.seqlen_q > p.seqlen_k:
            seen = p.seqlen_k * (1 - p.seqlen_k / p.seqlen_q / 2)
        elif p.mask != "causal" and p.seqlen_q < p.seqlen_k:
            seen = p.seqlen_k - p.seqlen_q / 2
        width = min(width, seen + keys / 2)
    return 1.0, 2e-12 * padded * width * (p.head_dim + p.head_dim_v), 1e-9 * p.bytes


@dataclass(frozen=True)
class Sample:
    """Plain SDPA in one bucket: what its law is fitted to.

    Attributes:
        row: the measurement that it is.
        terms: of the shape that was measured.
        device_ms: its device time, free of how clocks differed between runs.
    """

    row: Row
    terms: Terms
    device_ms: float


def device_ms(samples: Sequence[Sample], weights: Sequence[float], at: Terms) -> float:
    """The time where the terms are `at`, by the law of samples of these weights there."""
    a, b, c = fit(samples, weights)
    missed = total = 0.0
    for sample, weight in zip(samples, weights, strict=True):
        one, work, size = sample.terms
        missed += weight * math.log(sample.device_ms / (a * one + b * work + c * size))
        total += weight
    return (a * at[0] + b * at[1] + c * at[2]) * math.exp(missed / total)


def fit(samples: Sequence[Sample], weights: Sequence[float]) -> Terms:
    """launch, compute, memory: the least squares of relative errors, with fewer terms than samples
    and none below 0."""
    matrix = [[0.0] * 3 for _ in range(3)]
    right = [0.0] * 3
    for sample, weight in zip(samples, weights, strict=True):
        point = [term / sample.device_ms for term in sample.terms]
        for i, value in enumerate(point):
            value *= weight
            right[i] += value
            row = matrix[i]
            for j in range(i + 1):
                row[j] += value * point[j]
    used = [1, 0, 2][: max(1, len(samples) - 1)]  # in order of what they explain
    while True:
        found = _solve(
            [[matrix[max(i, j)][min(i, j)] for j in used] for i in used],
            [right[i] for i in used],
        )
        if found is not None and min(found) >= 0.0:
            break
        # Without the term that the samples want least, or do not tell from the others.
        used.pop(found.index(min(found)) if found is not None else -1)
    law = [0.0, 0.0, 0.0]
    for index, value in zip(used, found, strict=True):
        law[index] = value
    return law[0], law[1], law[2]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss on the scaled matrix, which is symmetric; None where it is singular."""
    size = len(right)
    scale = [1.0 / math.sqrt(matrix[i][i]) for i in range(size)]
    rows = [
        [matrix[i][j] * scale[i] * scale[j] for j in range(size)] + [right[i] * scale[i]]
        for i in range(size)
    ]
    for i in range(size):
        if rows[i][i] < 1e-9:
            return None
        for r in range(i + 1, size):
            factor = rows[r][i] / rows[i][i]
            for column in range(i, size + 1):
                rows[r][column] -= factor * rows[i][column]
    found = [0.0] * size
    for i in range(size - 1, -1, -1):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - known) / rows[i][i]
    return [value * scale[i] for i, value in enumerate(found)]
