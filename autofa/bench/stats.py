"""Medians and what can be said of them: distribution-free intervals from order statistics. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# Below six samples no pair of them encloses the median with 95%, so their range is widened to what
# a few samples can promise at best: 50% for one, 10% for five.
_FEW = 6
_FEW_SPREAD = 0.5


@dataclass(frozen=True)
class Summary:
    """Median, relative half width of its 95% interval, and the 10% and 90% quantiles."""

    median: float
    spread: float
    p10: float
    p90: float


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the order statistics of a sorted, non-empty sequence."""
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@lru_cache(maxsize=256)
def median_ranks(count: int) -> tuple[int, int]:
    """Indices of the order statistics that enclose the median of `count` samples with at least 95%;
    the outermost ones where there is no such pair. (The number of samples below the true median
    is binomial with p = 1/2.)"""
    below = 0.0
    rank = -1
    for k in range(count // 2):
        below += math.comb(count, k) / 2**count
        if below > 0.025:
            break
        rank = k
    low = max(rank, 0)
    return low, count - 1 - low


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the median; the whole range below six samples."""
    ordered = sorted(samples)
    low, high = median_ranks(len(ordered))
    return ordered[low], ordered[high]


def summarize(samples: Sequence[float], resolution: float = 0.0) -> Summary:
    """The summary of at least one positive sample.

    Args:
        resolution: the clock's, in the samples' unit; the spread is never below half of it.
    """
    ordered = sorted(samples)
    median = quantile(ordered, 0.5)
    low, high = interval(ordered)
    spread = max(high - low, resolution) / 2 / median if median > 0 else 0.0
    if len(ordered) < _FEW:
        spread = max(spread, _FEW_SPREAD / len(ordered))
    return Summary(median, spread, quantile(ordered, 0.1), quantile(ordered, 0.9))


def compare(challenger: Sequence[float], leader: Sequence[float], tie: float) -> str:
    """What paired samples say of two candidates: `slower` or `faster` (of the challenger, with
    95%), `equal` (within `tie`, with 95%), or `open`.

    Both sequences hold one sample per common round, in the same order, so that drift cancels.
    """
    if len(challenger) < _FEW:
        return "open"
    low, high = interval([math.log(c / x) for c, x in zip(challenger, leader, strict=True)])
    bound = math.log1p(tie)
    if -bound <= low and high <= bound:
        return "equal"
    if low > 0:
        return "slower"
    if high < 0:
        return "faster"
    return "open"
