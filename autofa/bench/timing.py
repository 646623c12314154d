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
from dataclasses import dataclass, field
from typing import Protocol

from autofa.bench.protocol import Plan, Timing
from autofa.bench.stats import compare, quantile, summarize

# A candidate whose fastest sample is this much slower than the best median after so many rounds
# leaves the screening. Its fastest, since what disturbs a sample only ever adds to it.
_LEAVES = ((2, 8.0), (3, 3.0), (5, 1.6))
# With fewer rounds than this, a ratio to plain SDPA takes all of SDPA's samples of the run: one
# disturbed sample of the common rounds would weigh more than the drift that pairing takes out.
_PAIRED_ROUNDS = 7


class Turn(Protocol):
    """One candidate made ready on one clock. Calling it takes one sample: (time_ms, call_ms)."""

    resolution_ms: float

    def __call__(self) -> tuple[float, float]: ...


@dataclass
class _Track:
    """One candidate's samples, by round."""

    turn: Turn
    samples: dict[int, tuple[float, float]] = field(default_factory=dict)

    def values(self, column: int, rounds: Sequence[int] | None = None) -> list[float]:
        rounds = list(self.samples) if rounds is None else rounds
        return [self.samples[r][column] for r in rounds]

    def median(self, column: int) -> float:
        return quantile(sorted(self.values(column)), 0.5)

    def timing(self, rounds: Sequence[int] | None = None) -> Timing:
        resolution = self.turn.resolution_ms
        device = summarize(self.values(0, rounds), resolution)
        call = summarize(self.values(1, rounds), resolution)
        return Timing(
            device.median,
            call.median,
            device.spread,
            call.spread,
            (device.p10, device.p90),
            (call.p10, call.p90),
            len(self.samples if rounds is None else rounds),
        )


@dataclass(frozen=True)
class Result:
    """Timings by candidate index, and the baseline's over each candidate's rounds (over all rounds
    where those are few)."""

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
    leader = min(active, key=lambda i: tracks[i].median(column))
    ahead = tracks[leader]
    for i in active:
        if i != leader:
            common = [r for r in tracks[i].samples if r in ahead.samples]
            own, theirs = tracks[i].values(column, common), ahead.values(column, common)
            if compare(own, theirs, tie) not in ("slower", "equal"):
                return False
    return True


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
    base = tracks[baseline]
    timings: list[Timing | None] = []
    baselines: list[Timing | None] = []
    for track in tracks:
        rounds = list(track.samples)
        timings.append(track.timing() if rounds else None)
        paired = rounds if len(rounds) >= _PAIRED_ROUNDS else None
        baselines.append(base.timing(paired) if rounds else None)
    return Result(tuple(timings), tuple(baselines), played, resolved)
