"""From a device's rows to which kernel is fastest in a bucket without any. Pure: no torch.

How much faster than plain SDPA a kernel is on the device is the mean of what kernels of its family
were in the buckets around, each weighted by how near its bucket is and how alike the kernels are
(Nadaraya-Watson, of logarithms). What those differ by, and how far the nearest lies, is its doubt.
A call costs the host time too, which is all that short calls take: `call = max(host, device time)`,
with plain SDPA's device time by the law of `time_model.py`.

Leaving out each bucket of two tunes of an H200 (57 and 69 buckets), this costs 2.1 and 2.3% of the
best kernel's device time, and never chose what was slower than plain SDPA. A law of three terms for
each kernel by itself cost 10 and 18%: few kernels are measured in many buckets, so that a third of
the buckets was left to plain SDPA. The constants were chosen on the same
rows, but none matters much: halved or doubled, the mean over both tunes, both modes, and three
radii around the bucket in which all was left out moved from 5.4% to between 4.8 and 6.0%, but for
`DOUBT_PER_OCTAVE`, which from 0.05 on leaves too much to SDPA (8.6%).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from autofa.device import Limits
from autofa.dispatch.likeness import Carrier, Traits, distance, likeness, nearness, sizes
from autofa.dispatch.time_model import Sample, device_ms, terms
from autofa.kernels import Candidate, Registry
from autofa.kernels.family import Variant
from autofa.kernels.vendor import BASELINE
from autofa.problem import Bucket, Problem
from autofa.store.ranking import newest
from autofa.store.rows import Row

# Measured buckets that are looked at.
MOST_BUCKETS = 12
# Nothing is learnt from buckets further away than this many octaves, and nothing said where any
# size lies further out than so many.
FARTHEST = 8.0
MOST_OCTAVES = 3.0
# The doubt: of two measurements of one kernel; of each octave to the nearest measurement of the
# family, and of each beyond all sizes measured; of one bucket alone, and less of more; and the
# share of what the measurements around differ by that their mean is off by.
LEAST_DOUBT = 0.01
DOUBT_PER_OCTAVE = 0.02
DOUBT_OUTSIDE = 0.1
DOUBT_OF_ONE = 0.15
SHARE_OF_SPREAD = 0.35
# Beyond which a prediction is none.
MOST_DOUBT = 0.5
# A kernel displaces plain SDPA where it is predicted faster by its doubt and this much more.
MARGIN = 0.03
# Calls that take so much longer than their device time take what the host does.
HOST_BOUND = 1.25
# From each bucket around only the fastest of each family are thought of, and the fastest predicted
# are told.
BEST_OF_FAMILY = 3
CONTENDERS = 6


@dataclass(frozen=True)
class Guess:
    """What is predicted of one candidate in one bucket.

    Attributes:
        ms: its time in the mode's measure; `device_ms` that of the device alone.
        speedup: plain SDPA's predicted time over `ms`.
        doubt: standard deviation of the log of `speedup`.
    """

    candidate: Candidate
    ms: float
    device_ms: float
    speedup: float = 1.0
    doubt: float = 0.0

    @property
    def faster(self) -> bool:
        """Than plain SDPA, beyond doubt."""
        return self.doubt <= MOST_DOUBT and math.log(self.speedup) > MARGIN + self.doubt

    @property
    def slower(self) -> bool:
        """Than plain SDPA, or not faster by more than does not count."""
        return self.doubt <= MOST_DOUBT and math.log(self.speedup) <= MARGIN


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a bucket.

    Attributes:
        guesses: the fastest candidates, best first; plain SDPA is not among them.
        baseline: plain SDPA; None where nothing is predicted.
        buckets: how many measured ones it comes from.
        why_not: why nothing is predicted.
    """

    guesses: tuple[Guess, ...] = ()
    baseline: Guess | None = None
    buckets: int = 0
    why_not: str = ""

    @property
    def source(self) -> str:
        return f"{self.buckets} measured bucket{'s' * (self.buckets != 1)}"


@dataclass(frozen=True)
class _Known:
    """A candidate that was measured in a bucket.

    Attributes:
        gain: log of its speedup over plain SDPA by device time.
    """

    bucket: Bucket
    traits: Traits
    gain: float
    row: Row


@dataclass(frozen=True)
class _Measured:
    """A bucket's candidates, the fastest first, and plain SDPA's sample."""

    known: tuple[_Known, ...]
    baseline: Sample | None


class Predictor:
    """The rows of one device, looked at when a bucket near them is first asked for.

    Args:
        measured: a bucket -> its rows.
        buckets: those that have rows.
    """

    def __init__(
        self, measured: Callable[[Bucket], Sequence[Row]], buckets: Sequence[Bucket]
    ) -> None:
        self._measured = measured
        self._buckets = tuple(sorted(buckets))
        self._looked_at: dict[Bucket, _Measured] = {}
        self._hosts: dict[str, float] | None = None
        self._carriers: dict[Limits, Carrier] = {}
        self._believed: dict[tuple[str, str], bool] = {}

    def predict(
        self,
        bucket: Bucket,
        mode: str,
        registry: Registry,
        limits: Limits,
        usable: Callable[[Candidate], bool],
        valid: Callable[[Row], bool],
    ) -> Prediction:
        """What the candidates take in `bucket`, which itself need not have been measured.

        Args:
            mode: `eager` or `graph`.
            usable: whether a candidate may answer at all.
            valid: whether a row may be believed.
        """
        carrier = self._carriers.setdefault(limits, Carrier(limits))
        far = sorted((distance(bucket, other), other) for other in self._buckets)
        near = {other: octaves for octaves, other in far[:MOST_BUCKETS] if octaves <= FARTHEST}
        found = {other: self._look_at(other, registry, carrier) for other in near}
        samples = {
            other: each.baseline
            for other, each in found.items()
            if each.baseline is not None and valid(each.baseline.row)
        }
        if not samples:
            return Prediction(why_not="no bucket near enough to it was measured")
        outside = _octaves_outside(bucket, tuple(samples))
        if outside > MOST_OCTAVES:
            far_off = f"its sizes are {outside:.0f} octaves beyond those that were measured"
            return Prediction(why_not=far_off)

        groups: dict[str, list[_Known]] = {}
        for other in samples:
            for known in found[other].known:
                if self._holds(known, valid):
                    groups.setdefault(known.traits.group, []).append(known)
        hosts = self._host_ms() if mode == "eager" else {}
        weights = [nearness(near[other]) for other in samples]
        sdpa_device = device_ms(tuple(samples.values()), weights, terms(bucket.problem, limits))
        sdpa_ms = max(sdpa_device, hosts.get(BASELINE, 0.0))

        guesses = []
        for members in groups.values():
            host = hosts.get(_host_of(members[0].row), 0.0)
            for traits in _thought_of(members, bucket, carrier, usable):
                gain, doubt = _estimate(traits, members, near)
                device = sdpa_device * math.exp(-gain)
                ms = max(device, host)
                doubt = math.hypot(doubt, DOUBT_OUTSIDE * outside)
                guesses.append(Guess(traits.candidate, ms, device, sdpa_ms / ms, doubt))
        guesses.sort(key=lambda g: (g.ms, g.device_ms, registry.simplicity(g.candidate.slug)))
        why_not = "" if guesses else "no other kernel was measured near it"
        own = Guess(registry.candidate(BASELINE), sdpa_ms, sdpa_device)
        return Prediction(tuple(guesses[:CONTENDERS]), own, len(samples), why_not)

    def _holds(self, known: _Known, valid: Callable[[Row], bool]) -> bool:
        """Whether a row may be believed. Of own kernels it is asked once: it costs the look at
        every source file, and `reload` makes another predictor. Vendors come and go."""
        row = known.row
        if not isinstance(known.traits.candidate, Variant):
            return valid(row)
        mark = row.slug, row.fingerprint
        if mark not in self._believed:
            self._believed[mark] = valid(row)
        return self._believed[mark]

    def _look_at(self, bucket: Bucket, registry: Registry, carrier: Carrier) -> _Measured:
        """One row per kernel: of the bucket's representative, else of its smallest shape."""
        if bucket in self._looked_at:
            return self._looked_at[bucket]
        rows = [row for row in newest(self._measured(bucket)) if row.status == "ok"]
        rows = [row for row in rows if row.speedup("graph") and row.speedup("eager")]
        rows.sort(key=lambda row: (row.problem != bucket.problem, row.problem, row.slug))
        usual: dict[Problem, list[float]] = {}
        for row in rows:
            usual.setdefault(row.problem, []).append(row.baseline_time_ms or 1.0)
        baseline = None
        known: dict[str, _Known] = {}
        for row in rows:
            candidate = registry.find(row.slug)
            if row.slug == BASELINE:
                at = terms(row.problem, carrier.limits)
                baseline = baseline or Sample(row, at, median(usual[row.problem]))
            elif candidate is not None and row.slug not in known:
                gain = math.log(row.speedup("graph") or 1.0)
                known[row.slug] = _Known(bucket, carrier.traits(candidate, bucket), gain, row)
        fastest = sorted(known.values(), key=lambda each: (-each.gain, each.row.slug))
        self._looked_at[bucket] = _Measured(tuple(fastest), baseline)
        return self._looked_at[bucket]

    def _host_ms(self) -> dict[str, float]:
        """The host's ms of a call: of each vendor's kernel, and of all of ours together."""
        if self._hosts is None:
            bound: dict[str, list[float]] = {}
            least: dict[str, float] = {}
            for bucket in self._buckets:
                for row in self._measured(bucket) if bucket.device != "cpu" else ():
                    call, time = row.call_ms, row.time_ms
                    if row.status == "ok" and call and time:
                        who = _host_of(row)
                        least[who] = min(call, least.get(who, call))
                        if call > HOST_BOUND * time:
                            bound.setdefault(who, []).append(call)
            # Of one that the host never held up, only the most that it costs is known.
            self._hosts = {**least, BASELINE: 0.0}
            self._hosts.update({who: median(calls) for who, calls in bound.items()})
        return self._hosts


def _host_of(row: Row) -> str:
    return row.slug if "==" in row.fingerprint else ""


def _octaves_outside(bucket: Bucket, others: Sequence[Bucket]) -> float:
    """How far any size of a bucket lies beyond all that were measured."""
    there = [sizes(other) for other in others]
    beyond = 0.0
    for axis, at in enumerate(sizes(bucket)):
        known = [place[axis] for place in there]
        beyond = max(beyond, min(known) - at, at - max(known))
    return beyond


def _thought_of(
    members: Sequence[_Known],
    bucket: Bucket,
    carrier: Carrier,
    usable: Callable[[Candidate], bool],
) -> list[Traits]:
    """A group's candidates for a bucket: its default, and what was fastest in those around."""
    found: dict[str, Candidate] = {}
    one = members[0].traits.candidate
    default = carrier.default(one.family, bucket) if isinstance(one, Variant) else None
    if default is not None and usable(default):
        found[default.slug] = default
    taken: dict[Bucket, int] = {}
    for known in members:
        taken[known.bucket] = taken.get(known.bucket, 0) + 1
        if taken[known.bucket] <= BEST_OF_FAMILY:
            carried = carrier.carried(known.traits, bucket, usable)
            if carried is not None:
                found.setdefault(carried.slug, carried)
    return [carrier.traits(candidate, bucket) for candidate in found.values()]


def _estimate(
    traits: Traits, members: Sequence[_Known], near: dict[Bucket, float]
) -> tuple[float, float]:
    """The log of a candidate's speedup over plain SDPA by device time, and the doubt about it."""
    weights = [nearness(near[k.bucket]) * likeness(traits, k.traits) for k in members]
    total = math.fsum(weights)
    mean = math.fsum(w * k.gain for w, k in zip(weights, members, strict=True)) / total
    squares = math.fsum(w * (k.gain - mean) ** 2 for w, k in zip(weights, members, strict=True))
    spread = math.sqrt(squares / total)
    buckets = {k.bucket for k in members}
    nearest = min(near[bucket] for bucket in buckets)
    doubts = DOUBT_OF_ONE / len(buckets), SHARE_OF_SPREAD * spread, DOUBT_PER_OCTAVE * nearest
    return mean, math.hypot(LEAST_DOUBT, *doubts)
