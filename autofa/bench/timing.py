"""Interleaved timing: every candidate takes a turn in every round, slow ones leave early.

Within a round the order is shuffled, so that drift of clocks, power and neighbours falls on all
alike; candidates are compared by the paired ratios of common rounds. Rounds that others disturbed
are played again and do not count. Which clock is read is the business of clocks.py.

Own kernels are compared with one another by device time in either mode: the host's part of their
calls is the same, and its noise would hide which is faster (`store.host_part` has figures).
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autofa.bench.protocol import Plan, Timing
from autofa.bench.stats import compare, quantile, summarize

# A candidate whose fastest sample is this much slower than the best median after so many rounds
# leaves the screening. Its fastest, since what disturbs a sample only ever adds to it.
_LEAVES = ((2, 8.0), (3, 3.0), (5, 1.6))

# A round was disturbed if our threads waited for cores for this share of it, all together. With one
# busy process beside two threads on two cores SDPA took 3 to 400 times as long, evenly, so that no
# spread told of it; the threads then waited 0.3 to 0.8 of the time, on the quiet machine 0.01, and
# the median of rounds below 0.1 was the quiet machine's.
_WAITED = 0.1
# Or if plain SDPA took so many times its median: what a machine does that does not count waiting.
_FAR_OFF = 2.0
# Fewer undisturbed samples say nothing of their own spread.
_LEAST_CALM = 2
# At most so many times the rounds of a plan are played.
_PATIENCE = 2


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

    def far_off(self, column: int) -> set[int]:
        """The rounds in which this one took far longer than usual."""
        limit = _FAR_OFF * self.median(column)
        return {r for r, sample in self.samples.items() if sample[column] > limit}

    def calm(self, disturbed: set[int]) -> dict[int, tuple[float, float]]:
        return {r: sample for r, sample in self.samples.items() if r not in disturbed}

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
    """Timings by candidate index, and the baseline's as it was in each candidate's rounds.

    Attributes:
        rounds: how many were played.
        waited: the share of the rounds that count for which our threads waited for cores.
    """

    timings: tuple[Timing | None, ...]
    baselines: tuple[Timing | None, ...]
    rounds: int
    resolved: bool
    waited: float


def _slow(tracks: Sequence[_Track], active: list[int], column: int, baseline: int) -> set[int]:
    seen = [i for i in active if tracks[i].samples]
    best = min((tracks[i].median(column) for i in seen), default=0.0)
    return {
        i
        for i in seen
        if i != baseline
        and any(
            len(tracks[i].samples) >= rounds and min(tracks[i].values(column)) > ratio * best
            for rounds, ratio in _LEAVES
        )
    }


def _drift(
    played: Sequence[_Track], counted: Sequence[_Track], rounds: Sequence[int], column: int
) -> float:
    """How the times of `rounds` compare with those of the rounds that count: 1 if all were alike.

    Told by all who took part throughout, since the few samples of plain SDPA alone would bring
    their own noise into the ratio of every candidate that left early.
    """
    ratios = [
        track.samples[r][column] / median
        for track, own in zip(played, counted, strict=True)
        for median in [own.median(column)]
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


class _Rounds:
    """The rounds of one timing: who takes part, and which of them count."""

    def __init__(
        self, turns: Sequence[Turn], baseline: int, plan: Plan, own: Collection[int]
    ) -> None:
        self.tracks = [_Track(turn) for turn in turns]
        self.active = list(range(len(turns)))
        self.played = 0
        self._baseline = baseline
        self._plan = plan
        self._column = 1 if plan.mode == "eager" else 0
        self._own = frozenset(own)
        self._waited: list[tuple[float, float]] = []
        self._disturbed: set[int] = set()
        self._screened = False

    def end_round(self, seconds: float, waited: float) -> None:
        """After each round: how long it took, and how long threads waited for cores in it."""
        self.played += 1
        self._waited.append((seconds, waited))
        late = {r for r, (took, lost) in enumerate(self._waited) if lost > _WAITED * took}
        self._disturbed = late | self.tracks[self._baseline].far_off(self._column)
        if not self._screened:
            self._screen()

    def _screen(self) -> None:
        plan, column = self._plan, self._column
        calm = [_Track(track.turn, track.calm(self._disturbed)) for track in self.tracks]
        slow = _slow(calm, self.active, column, self._baseline)
        own = [i for i in self.active if i in self._own]
        slow |= _slow(calm, own, 0, self._baseline)
        self.active = [i for i in self.active if i not in slow]
        if max(self.counted, self.played // _PATIENCE) >= plan.screen_rounds:
            self._screened = True
            tracks = self.kept()
            ranked = self._ranked(tracks)
            best = [i for i in ranked if i != self._baseline][: plan.finalists]
            self.active = sorted({*best, self._baseline})

    @property
    def counted(self) -> int:
        return self.played - len(self._disturbed)

    def kept(self) -> list[_Track]:
        """The tracks by what counts: all of one's samples where too few were taken undisturbed."""
        found = []
        for track in self.tracks:
            calm = track.calm(self._disturbed)
            found.append(_Track(track.turn, calm if len(calm) >= _LEAST_CALM else track.samples))
        return found

    def _ranked(self, tracks: Sequence[_Track]) -> list[int]:
        """Who takes part, the fastest first; own kernels at the places of their calls, in the order
        of their device times."""
        calls = sorted(self.active, key=lambda i: (tracks[i].median(self._column), i))
        own = sorted(self._own.intersection(calls), key=lambda i: (tracks[i].median(0), i))
        order = iter(own)
        return [next(order) if i in self._own else i for i in calls]

    def resolved(self) -> bool:
        """Whether it is known who of those that took part in all rounds is the fastest."""
        if self.counted < self._plan.min_rounds:
            return False
        tracks = self.kept()
        leader, *others = self._ranked(tracks)
        return all(self._decided(tracks, leader, other) for other in others)

    def _decided(self, tracks: Sequence[_Track], leader: int, other: int) -> bool:
        column = 0 if self._own.issuperset((leader, other)) else self._column
        ahead, behind = tracks[leader].values(column), tracks[other].values(column)
        return compare(behind, ahead, self._plan.tie) in ("slower", "equal")

    def over(self) -> bool:
        """Whether all rounds of the plan are played."""
        return max(self.counted, self.played // _PATIENCE) >= self._plan.max_rounds

    def result(self, resolved: bool) -> Result:
        kept = self.kept()
        lasted = [i for i, t in enumerate(self.tracks) if len(t.samples) == self.played]
        plain = kept[self._baseline].timing() if self.played else None
        raw, present = [self.tracks[i] for i in lasted], [kept[i] for i in lasted]
        timings: list[Timing | None] = []
        baselines: list[Timing | None] = []
        for i, track in enumerate(kept):
            rounds = list(track.samples)
            timings.append(track.timing() if rounds else None)
            if plain is None or i in lasted:
                baselines.append(plain)
            else:
                time_drift, call_drift = (_drift(raw, present, rounds, c) for c in (0, 1))
                baselines.append(_at(plain, time_drift, call_drift, len(rounds)))
        count = [self._waited[r] for r in kept[self._baseline].samples]
        took, waited = sum(took for took, _ in count), sum(lost for _, lost in count)
        share = waited / took if took > 0 else 0.0
        return Result(tuple(timings), tuple(baselines), self.played, resolved, share)


def take_turns(
    turns: Sequence[Turn],
    baseline: int,
    plan: Plan,
    started: Callable[[int], None],
    now: Callable[[], float] = time.perf_counter,
    waited: Callable[[], float] = lambda: 0.0,
    own: Collection[int] = (),
) -> Result:
    """Runs the rounds.

    Args:
        turns: the candidates, warmed up.
        baseline: index of plain SDPA, which takes part in every round.
        started: told the index before each turn.
        now: seconds, for the budget.
        waited: seconds that our threads have waited for cores until now, all together.
        own: indices of the candidates that the host calls in the same way.
    """
    order = random.Random(plan.seed)
    rounds = _Rounds(turns, baseline, plan, own)
    begin, lost = now(), waited()
    deadline = begin + plan.budget_s
    resolved = False
    collecting = gc.isenabled()
    gc.disable()
    try:
        while not resolved and not rounds.over() and begin <= deadline:
            order.shuffle(rounds.active)
            for i in rounds.active:
                started(i)
                rounds.tracks[i].samples[rounds.played] = rounds.tracks[i].turn()
            end, lost_now = now(), waited()
            rounds.end_round(end - begin, lost_now - lost)
            begin, lost = end, lost_now
            resolved = rounds.resolved()
    finally:
        if collecting:
            gc.enable()
    return rounds.result(resolved)
