"""Interleaved timing: every candidate takes a turn in every round, slow ones leave early.

Within a round the order is shuffled, so that drift of clocks, power and neighbours falls on all
alike; candidates are compared by the paired ratios of common rounds. Which clock is read is the
business of clocks.py.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autofa.bench.protocol import Plan, Timing
from autofa.bench.stats import compare, quantile, summarize

# A candidate whose fastest sample is this much slower than the best median after so many rounds
# leaves the screening. Its fastest, since what disturbs a sample only ever adds to it.
_LEAVES = ((2, 8.0), (3, 3.0), (5, 1.6))


class Turn(Protocol):
    """One candidate made ready on one clock. Calling it takes one sample: (time_ms, call_ms)."""

    resolution_ms: float

    def __call__(self) -> tuple[float, float]: ...


@dataclass
class _Track:
    """One candidate's samples, by round."""

    turn: Turn
    samples: dict[int, tuple[float, float]] = field(default_factory=dict)

    def values(self, column: int) -> list[float]:
        return [sample[column] for sample in self.samples.values()]

    def median(self, column: int) -> float:
        return quantile(sorted(self.values(column)), 0.5)

    def timing(self) -> Timing:
        device = summarize(self.values(0), self.turn.resolution_ms)
        call = summarize(self.values(1), self.turn.resolution_ms)
        return Timing(
            device.median,
            call.median,
            device.spread,
            call.spread,
            (device.p10, device.p90),
            (call.p10, call.p90),
            len(self.samples),
        )


@dataclass(frozen=True)
class Result:
    """Timings by candidate index, and the baseline's as it was in each candidate's rounds."""

    timings: tuple[Timing | None, ...]
    baselines: tuple[Timing | None, ...]
    rounds: int
    resolved: bool


def _slow(tracks: Sequence[_Track], active: list[int], column: int, baseline: int) -> set[int]:
    best = min(tracks[i].median(column) for i in active)
    return {
        i
        for i in active
        if i != baseline
        and any(
            len(tracks[i].samples) >= rounds and min(tracks[i].values(column)) > ratio * best
            for rounds, ratio in _LEAVES
        )
    }


def _resolved(tracks: Sequence[_Track], active: list[int], column: int, tie: float) -> bool:
    """Whether the order of those who took part in all rounds is known."""
    leader = tracks[min(active, key=lambda i: tracks[i].median(column))]
    ahead = leader.values(column)
    others = (tracks[i] for i in active if tracks[i] is not leader)
    return all(compare(t.values(column), ahead, tie) in ("slower", "equal") for t in others)


def _drift(present: Sequence[_Track], rounds: Sequence[int], column: int) -> float:
    """How the times of `rounds` compare with those of all rounds: 1 if all were alike.

    Told by all who took part throughout, since the few samples of plain SDPA alone would bring
    their own noise into the ratio of every candidate that left early.
    """
    ratios = [
        track.samples[r][column] / median
        for track in present
        for median in [track.median(column)]
        for r in rounds
    ]
    return quantile(sorted(ratios), 0.5)


def _at(baseline: Timing, time_drift: float, call_drift: float, rounds: int) -> Timing:
    (time_low, time_high), (call_low, call_high) = baseline.time_quantiles, baseline.call_quantiles
    return replace(
        baseline,
        time_ms=baseline.time_ms * time_drift,
        call_ms=baseline.call_ms * call_drift,
        time_quantiles=(time_low * time_drift, time_high * time_drift),
        call_quantiles=(call_low * call_drift, call_high * call_drift),
        samples=rounds,
    )


def take_turns(
    turns: Sequence[Turn],
    baseline: int,
    plan: Plan,
    started: Callable[[int], None],
    now: Callable[[], float] = time.perf_counter,
) -> Result:
    """Runs the rounds.

    Args:
        turns: the candidates, warmed up.
        baseline: index of plain SDPA, which takes part in every round.
        started: told the index before each turn.
        now: seconds, for the budget.
    """
    column = 1 if plan.mode == "eager" else 0
    order = random.Random(plan.seed)
    tracks = [_Track(turn) for turn in turns]
    active = list(range(len(turns)))
    deadline = now() + plan.budget_s
    resolved = False
    played = 0
    collecting = gc.isenabled()
    gc.disable()
    try:
        while played < plan.max_rounds and not resolved:
            order.shuffle(active)
            for i in active:
                started(i)
                tracks[i].samples[played] = tracks[i].turn()
            played += 1
            if played <= plan.screen_rounds:
                slow = _slow(tracks, active, column, baseline)
                active = [i for i in active if i not in slow]
            if played == plan.screen_rounds:
                ranked = sorted(active, key=lambda i: (tracks[i].median(column), i))
                best = [i for i in ranked if i != baseline][: plan.finalists]
                active = sorted({*best, baseline})
            if played >= plan.min_rounds:
                resolved = _resolved(tracks, active, column, plan.tie)
            if now() > deadline:
                break
    finally:
        if collecting:
            gc.enable()
    present = [track for track in tracks if len(track.samples) == played]
    plain = tracks[baseline].timing() if played else None
    timings: list[Timing | None] = []
    baselines: list[Timing | None] = []
    for track in tracks:
        rounds = list(track.samples)
        timings.append(track.timing() if rounds else None)
        if plain is None or len(rounds) == played:
            baselines.append(plain)
        else:
            time_drift, call_drift = (_drift(present, rounds, column) for column in (0, 1))
            baselines.append(_at(plain, time_drift, call_drift, len(rounds)))
    return Result(tuple(timings), tuple(baselines), played, resolved)
