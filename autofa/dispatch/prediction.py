"""From a device's rows to which kernel is fastest in a bucket without any. Pure: no torch.

A call costs the host time too, which is all that short calls take: `call = max(host, device time)`,
with the device time of `time_model.py`. A candidate is compared with plain SDPA by the ratio of the
two. The doubt about that ratio is how far it is off where it is known: each neighbour is predicted
from what lies as far from it as the nearest measurement lies from the bucket in question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from autofa.device import Limits
from autofa.dispatch.time_model import Sample, device_ms, distance, nearness, sizes, terms
from autofa.kernels import Candidate, Registry
from autofa.kernels.family import Variant
from autofa.kernels.vendor import BASELINE
from autofa.problem import Bucket, Problem
from autofa.store.ranking import newest
from autofa.store.rows import MODES, Row

# Measured buckets that are looked at; fewer do not show how well a law holds.
MOST_BUCKETS = 12
LEAST_BUCKETS = 3
# Nothing is said where any size lies further out than this many octaves; each adds to the doubt.
MOST_OCTAVES = 3.0
DOUBT_PER_OCTAVE = 0.1
# That of two measurements of one kernel, and that beyond which a prediction is none.
LEAST_DOUBT = 0.01
MOST_DOUBT = 0.5
# A kernel displaces plain SDPA where it is predicted faster by this many of them, and this much.
# Leaving out each bucket of three tunes of an H200, nothing so chosen was slower by more than 2 %,
# nor with 1.0; with 2.0 twice as much of what tuning gains was lost.
DEVIATIONS = 1.25
MARGIN = 0.03
# Or where it was faster by so much in every bucket near enough that has it, and the bucket lies no
# more octaves outside of those. A law of few far buckets may be off by a factor of two and still
# not by enough to matter: on a Xeon with 35 buckets tuned, head dims of 320 and 512 lost a third to
# half that way. Without the second, kernels that only many queries had would answer for one (0.3x).
ALWAYS = 1.1
ALWAYS_OCTAVES = 2.0
# Calls that take so much longer than their device time take what the host does.
HOST_BOUND = 1.25
# Only the fastest few are looked at closely.
CONTENDERS = 3


@dataclass(frozen=True)
class Guess:
    """What is predicted of one candidate in one bucket.

    Attributes:
        ms: its time in the mode's measure; `device_ms` that of the device alone.
        speedup: plain SDPA's predicted time over `ms`.
        doubt: standard deviation of the log of `speedup`.
        least: the smallest speedup measured in the buckets that it comes from; 0 where the bucket
            lies too far out of them to tell.
    """

    candidate: Candidate
    ms: float
    device_ms: float
    speedup: float = 1.0
    doubt: float = 0.0
    least: float = 0.0

    @property
    def faster(self) -> bool:
        """Than plain SDPA: beyond doubt, or by the law where it clearly was in every bucket."""
        sure = math.log(self.speedup) > MARGIN + DEVIATIONS * self.doubt
        if sure and self.doubt <= MOST_DOUBT:
            return True
        return math.log(self.speedup) > MARGIN and self.least > ALWAYS

    @property
    def slower(self) -> bool:
        """Than plain SDPA, or not faster by more than does not count."""
        return math.log(self.speedup) <= MARGIN and self.doubt <= MOST_DOUBT


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


# A kernel whatever it is compiled for: a family's name and the values, or a vendor's slug.
_Kernel = tuple[object, ...]


@dataclass(frozen=True)
class _Known:
    """A kernel that was measured: its samples, and one of the candidates that they are of."""

    candidate: Candidate
    samples: list[Sample]


class TimeModel:
    """The rows of one device as samples of laws, made when a bucket near them is first asked for.

    Args:
        measured: a bucket -> its rows.
        buckets: those that have rows.
    """

    def __init__(
        self, measured: Callable[[Bucket], Sequence[Row]], buckets: Sequence[Bucket]
    ) -> None:
        self._measured = measured
        self._buckets = tuple(sorted(buckets))
        self._samples: dict[int, dict[_Kernel, tuple[Candidate, Sample]]] = {}
        self._candidates: dict[str, tuple[_Kernel, Candidate] | None] = {}
        self._hosts: dict[str, float] | None = None

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
            valid: whether a row may be believed; asked of one per slug and fingerprint of the few
                kernels that count.
        """
        far = sorted((distance(bucket, other), at) for at, other in enumerate(self._buckets))
        near = {at: octaves for octaves, at in far[:MOST_BUCKETS] if octaves < math.inf}
        kernels: dict[_Kernel, _Known] = {}
        for at in near:
            for kernel, (candidate, sample) in self._samples_in(at, registry, limits).items():
                kernels.setdefault(kernel, _Known(candidate, [])).samples.append(sample)
        believed: dict[tuple[str, str], bool] = {}

        def holding(found: Sequence[Sample]) -> list[Sample]:
            kept = []
            for sample in found:
                mark = sample.row.slug, sample.row.fingerprint
                if mark not in believed:
                    believed[mark] = valid(sample.row)
                if believed[mark]:
                    kept.append(sample)
            return kept

        sdpa = kernels.pop((BASELINE,), None)
        baseline = holding(sdpa.samples) if sdpa is not None else []
        if sdpa is None or len(baseline) < LEAST_BUCKETS:
            few = f"fewer than {LEAST_BUCKETS} buckets near enough to it were measured"
            return Prediction(why_not=few)
        outside = _octaves_outside(bucket, [self._buckets[sample.bucket] for sample in baseline])
        if outside > MOST_OCTAVES:
            far_off = f"its sizes are {outside:.0f} octaves beyond those that were measured"
            return Prediction(why_not=far_off)
        self._add_defaults(kernels, bucket, near, registry, limits)

        hosts = self._host_ms() if mode == "eager" else {}
        view = _View(bucket, mode, limits, hosts, near, self._distances(near), baseline, outside)
        # What a tune screened out elsewhere has rows only where it was good.
        least = max(LEAST_BUCKETS, len(baseline) // 2)
        rough = []
        for kernel, known in kernels.items():
            if len(known.samples) >= least:
                times = view.times(known.candidate, known.samples)
                rough.append((times, tuple(map(str, kernel)), known))
        guesses: list[Guess] = []
        for _, _, known in sorted(rough, key=lambda item: item[:2]):
            here = _compiled_for(known.candidate, bucket.problem)
            found = holding(known.samples) if usable(here) else []
            if len(found) >= least:
                guesses.append(view.guess(here, found))
            if len(guesses) == CONTENDERS:
                break
        guesses.sort(key=lambda g: (g.ms, g.device_ms, registry.simplicity(g.candidate.slug)))
        why_not = "" if guesses else "no other kernel was measured in enough buckets near it"
        own = Guess(sdpa.candidate, *view.times(sdpa.candidate, baseline))
        return Prediction(tuple(guesses), own, len(baseline), why_not)

    def _distances(self, near: Iterable[int]) -> dict[tuple[int, int], float]:
        return {(a, b): distance(self._buckets[a], self._buckets[b]) for a in near for b in near}

    def _samples_in(
        self, at: int, registry: Registry, limits: Limits
    ) -> dict[_Kernel, tuple[Candidate, Sample]]:
        """One per kernel: of the bucket's representative, else of its smallest shape."""
        found = self._samples.get(at)
        if found is not None:
            return found
        found = self._samples[at] = {}
        bucket = self._buckets[at]
        rows = [row for row in newest(self._measured(bucket)) if row.status == "ok"]
        rows = [row for row in rows if row.speedup("graph") and row.speedup("eager")]
        rows.sort(key=lambda row: (row.problem != bucket.problem, row.problem, row.slug))
        usual: dict[Problem, list[float]] = {}
        for row in rows:
            usual.setdefault(row.problem, []).append(row.baseline_time_ms or 1.0)
        for row in rows:
            if row.slug not in self._candidates:
                self._candidates[row.slug] = _named(row.slug, registry)
            named = self._candidates[row.slug]
            if named is None or named[0] in found:
                continue
            speedups = {mode: row.speedup(mode) or 1.0 for mode in MODES}
            sample = Sample(
                at,
                terms(named[1], row.problem, limits),
                median(usual[row.problem]) / speedups["graph"],
                row,
                speedups,
            )
            found[named[0]] = named[1], sample
        return found

    def _add_defaults(
        self,
        kernels: dict[_Kernel, _Known],
        bucket: Bucket,
        near: Iterable[int],
        registry: Registry,
        limits: Limits,
    ) -> None:
        """A family's default stands for its default elsewhere: for head dims with tiles of their
        own."""
        for family in registry.families:
            here = family.default_variant(bucket.problem, limits)
            if here is None:
                continue
            known = kernels.setdefault(_kernel(here), _Known(here, []))
            if len(known.samples) >= LEAST_BUCKETS:
                continue
            has = {sample.bucket for sample in known.samples}
            for at in near:
                there = family.default_variant(self._buckets[at].problem, limits)
                if there is not None and at not in has and _kernel(there) in self._samples[at]:
                    known.samples.append(self._samples[at][_kernel(there)][1])

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


def _named(slug: str, registry: Registry) -> tuple[_Kernel, Candidate] | None:
    candidate = registry.find(slug)
    return None if candidate is None else (_kernel(candidate), candidate)


def _kernel(candidate: Candidate) -> _Kernel:
    if isinstance(candidate, Variant):
        return candidate.family.name, *candidate.values
    return (candidate.slug,)


def _compiled_for(candidate: Candidate, problem: Problem) -> Candidate:
    if not isinstance(candidate, Variant):
        return candidate
    return replace(
        candidate,
        dtype=candidate.dtype and problem.dtype,
        head_dim=candidate.head_dim and problem.head_dim,
        mask=candidate.mask and problem.mask,
    )


def _octaves_outside(bucket: Bucket, others: Sequence[Bucket]) -> float:
    """How far any size of a bucket lies beyond all that were measured."""
    there = [sizes(other) for other in others]
    beyond = 0.0
    for axis, at in enumerate(sizes(bucket)):
        known = [place[axis] for place in there]
        beyond = max(beyond, min(known) - at, at - max(known))
    return beyond


@dataclass(frozen=True)
class _View:
    """One bucket in one mode, as samples are asked about it.

    Attributes:
        near: how far the measured buckets are; `between` from one another.
        baseline: the samples of plain SDPA.
        outside: octaves beyond what was measured.
        sdpa_ms: what plain SDPA would have been predicted to take in measured buckets.
    """

    bucket: Bucket
    mode: str
    limits: Limits
    hosts: dict[str, float]
    near: dict[int, float]
    between: dict[tuple[int, int], float]
    baseline: list[Sample]
    outside: float
    sdpa_ms: dict[tuple[int, float], float | None] = field(default_factory=dict)

    def times(self, candidate: Candidate, samples: Sequence[Sample]) -> tuple[float, float]:
        """Its time in the mode's measure, and that of the device, in ms."""
        weights = [nearness(self.near[sample.bucket]) for sample in samples]
        at = terms(candidate, self.bucket.problem, self.limits)
        device = device_ms(samples, weights, at)
        return max(device, self._host(samples)), device

    def _host(self, samples: Sequence[Sample]) -> float:
        return self.hosts.get(_host_of(samples[0].row), 0.0)

    def guess(self, candidate: Candidate, samples: Sequence[Sample]) -> Guess:
        ms, device = self.times(candidate, samples)
        sdpa_ms, _ = self.times(candidate, self.baseline)
        doubt = math.hypot(self._doubt(samples), DOUBT_PER_OCTAVE * self.outside)
        least = min(sample.speedups[self.mode] for sample in samples)
        if _octaves_outside(self.bucket, [s.row.bucket for s in samples]) > ALWAYS_OCTAVES:
            least = 0.0
        return Guess(candidate, ms, device, sdpa_ms / ms, doubt, least)

    def _doubt(self, samples: Sequence[Sample]) -> float:
        """How far off the ratio is in buckets like this one, where as little is known nearby."""
        of_sdpa = {sample.bucket: sample for sample in self.baseline}
        gap = max(min(self.near[sample.bucket] for sample in samples), 0.1)
        squares = weights = 0.0
        count = 0
        for sample in samples:
            theirs = of_sdpa.get(sample.bucket)
            own_ms = self._from_afar(sample, samples, gap)
            sdpa_ms = self._sdpa_from_afar(theirs, gap) if theirs is not None else None
            if own_ms is not None and sdpa_ms is not None:
                off = math.log(sdpa_ms / own_ms / sample.speedups[self.mode])
                weight = nearness(self.near[sample.bucket])
                squares += weight * off * off
                weights += weight
                count += 1
        if count < LEAST_BUCKETS:
            return math.inf
        # A few residuals are a small sample of what they could have been.
        return math.hypot(LEAST_DOUBT, math.sqrt(squares / weights * count / (count - 2)))

    def _sdpa_from_afar(self, sample: Sample, gap: float) -> float | None:
        key = sample.bucket, gap  # most candidates have the same nearest bucket
        if key not in self.sdpa_ms:
            self.sdpa_ms[key] = self._from_afar(sample, self.baseline, gap)
        return self.sdpa_ms[key]

    def _from_afar(self, sample: Sample, samples: Sequence[Sample], gap: float) -> float | None:
        others = sorted(
            ((self.between[sample.bucket, s.bucket], s.bucket, s) for s in samples if s != sample),
            key=lambda item: item[:2],
        )
        away = [(octaves, other) for octaves, _, other in others if octaves >= gap]
        if len(away) < LEAST_BUCKETS - 1:
            away = [(octaves, other) for octaves, _, other in others[1 - LEAST_BUCKETS :]]
        if len(away) < LEAST_BUCKETS - 1:
            return None
        weights = [nearness(octaves) for octaves, _ in away]
        device = device_ms([other for _, other in away], weights, sample.terms)
        return max(device, self._host(samples))
