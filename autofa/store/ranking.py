"""Which candidate is best in a bucket, and whether a stored row may still be believed. Pure.

Clocks drift between runs, so absolute times are compared within one run only; across runs and
shapes only speedups over plain SDPA are, each measured against SDPA's device time of its own run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autofa.device import DeviceKey, limits_of
from autofa.errors import UsageError
from autofa.kernels.family import Variant
from autofa.kernels.registry import Registry
from autofa.kernels.vendor import BASELINE
from autofa.problem import Bucket, Problem
from autofa.store.host_part import is_number, logs_over_sdpa
from autofa.store.rows import FAILURES, Provenance, Row, age

CURRENT = "current"
VALID = "valid"

# Half-width that every median is given at least: medians of one kernel in interleaved rounds of
# two runs differ by about 1% on a quiet machine, although each run's own interval is narrower.
SPREAD_FLOOR = 0.005
# However wide the intervals, what is slower than the fastest by more than this is not preferred to
# it for being simpler. Plain SDPA is, as it needs no proof, but not across more than a tenth or so:
# on a loaded machine its own interval was seen to reach over a factor of two.
TIE_MOST = 0.01
SDPA_TIE_MOST = 0.12
# Among the details of a row: it won here before an upgrade, and was re-timed after it. It stays
# while nothing is faster by more than `HELD_MOST`: by `TIE_MOST` something may have been then, and
# two processes on one CPU differ by 2 to 3% in how their kernels compare. What lost to it then and
# was not re-timed does not win now, since ratios to SDPA of two runs differ by 5% by themselves.
HELD = "held"
HELD_MOST = 0.05
# Half-width where a row has none: wide enough that only clear differences count.
SPREAD_UNKNOWN = 0.05


def validity(
    row: Row,
    registry: Registry,
    fingerprint_of: Callable[[Variant, str], str],
    today: Provenance | None = None,
) -> str:
    """`current`, `valid`, or the reason why the row may not be used.

    Valid: the slug is legal under today's declarations and, for own kernels, the source
    fingerprint matches; for vendor kernels, the installed library's major.minor does. Current:
    valid, and torch, driver and (own kernels) compiler are those of `today`; what `today` leaves
    empty is not compared, and without `today` nothing is current.

    Args:
        fingerprint_of: `(variant, build target)` -> today's source fingerprint.
    """
    candidate = registry.find(row.slug)
    if candidate is None:
        return "no such kernel is declared today"
    try:
        limits = limits_of(row.device)
    except UsageError as error:
        return str(error)
    refusal = candidate.refusal(row.problem, limits)
    if refusal is not None:
        return f"not legal today: {refusal}"
    if isinstance(candidate, Variant):
        if fingerprint_of(candidate, candidate.target(limits)) != row.fingerprint:
            return "the kernel's source has changed since"
    else:
        version = candidate.version()
        if version is None:
            return f"{candidate.library} is not installed"
        if row.fingerprint != f"{candidate.library}=={version}":
            return f"measured with {row.fingerprint}, installed is {candidate.library}=={version}"
    if today is None:
        return VALID
    names = ["torch", "driver"] + ["compiler"] * isinstance(candidate, Variant)
    for name in names:
        now = getattr(today, name)
        if now and now != getattr(row.provenance, name):
            return VALID
    return CURRENT


def is_valid(answer: str) -> bool:
    """Whether an answer of `validity` lets the row be used."""
    return answer in (CURRENT, VALID)


@dataclass(frozen=True)
class Ranked:
    """One candidate's place in a bucket.

    Attributes:
        rank: 1 is the one to use.
        speedup: over plain SDPA, geometric mean over the bucket's shapes; None where SDPA itself
            has no time there.
        tied: nothing that could win is faster by more than the noise.
        beats_sdpa: faster than plain SDPA by more than the noise. False for plain SDPA; True for
            all where SDPA has no time. If it is False for rank 1, use plain SDPA.
        rows: the newest row per shape, ordered by shape.
    """

    slug: str
    rank: int
    speedup: float | None
    tied: bool
    beats_sdpa: bool
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class _Score:
    """Natural log of a pooled ratio, with the half-width of its interval.

    Attributes:
        device: the same of device times; -inf where they are missing.
    """

    slug: str
    log: float
    half: float
    device: float
    rows: tuple[Row, ...]

    @property
    def low(self) -> float:
        return self.log - self.half

    @property
    def high(self) -> float:
        return self.log + self.half


def group(rows: Iterable[Row]) -> dict[tuple[DeviceKey, Bucket], list[Row]]:
    """Rows by device and bucket, both in sorted order."""
    found: dict[tuple[DeviceKey, Bucket], list[Row]] = {}
    for row in rows:
        found.setdefault((row.device, row.bucket), []).append(row)
    return dict(sorted(found.items()))


def newest(rows: Iterable[Row]) -> list[Row]:
    """The newest row per device, slug and shape, whatever its status; `pruned` counts last.

    The order of `rows` does not matter.
    """
    found: dict[tuple[DeviceKey, str, Problem], Row] = {}
    for row in rows:
        key = (row.device, row.slug, row.problem)
        other = found.get(key)
        if other is None or _later(row, other):
            found[key] = row
    return list(found.values())


def _later(row: Row, other: Row) -> bool:
    mine, theirs = age(row), age(other)
    return mine > theirs if mine != theirs else row.content_hash > other.content_hash


def rank(rows: Sequence[Row], mode: str, registry: Registry) -> list[Ranked]:
    """The candidates of one device's bucket, the one to use first, the others by speedup.

    Rows that are not ok are never returned, nor is a candidate whose newest row failed at any
    shape of the bucket. A candidate is tied if nothing is faster than it by more than both
    intervals, nor by more than `TIE_MOST` (`SDPA_TIE_MOST` for plain SDPA), nor, of two that the
    caller sees as equal, the other one on the device. The winner is the simplest
    (`Registry.simplicity`) of the tied; a challenger displaces `torch.sdpa` only where it
    is faster by more than the noise or than `SDPA_TIE_MOST`. After an upgrade that was re-timed
    (`HELD`) the winner of before stays while nothing is faster by more than `HELD_MOST`, and only
    rows since then are compared with it. Whether rows are valid is for the caller to ask. The order
    of `rows` does not matter.
    """
    latest = newest(rows)
    failed = {row.slug for row in latest if row.status in FAILURES}
    usable = [row for row in latest if row.status == "ok" and row.slug not in failed]
    with_baseline = [row for row in usable if is_number(row.speedup(mode))]
    logs = (
        logs_over_sdpa(with_baseline, mode, registry)
        if with_baseline
        else _within_newest_run(usable, mode)
    )
    scores = _pool(logs, mode)
    if not scores:
        return []

    held = max((row for row in usable if _held(row)), key=age, default=None)
    able = [score for score in scores if held is None or _since(held, score.rows)] or scores
    best_low = max(score.low for score in able)
    best = max(score.log for score in able)
    tied = {
        score.slug
        for score in able
        if score.high >= best_low
        and score.log >= best - (SDPA_TIE_MOST if score.slug == BASELINE else TIE_MOST)
    }
    first = held.slug if held is not None else None
    tied.update(s.slug for s in able if s.slug == first and s.log >= best - HELD_MOST)
    baseline = _Score(BASELINE, 0.0, SPREAD_FLOOR, 0.0, ())
    baseline = next((score for score in scores if score.slug == BASELINE), baseline)
    beats = {
        score.slug
        for score in scores
        if score.slug != BASELINE
        and (
            not with_baseline
            or score.low > baseline.high
            or score.log > baseline.log + SDPA_TIE_MOST
        )
    }
    contenders = (tied & beats) if BASELINE not in tied else tied
    slower = _slower_on_device([s for s in scores if s.slug in (contenders or tied)])
    tied -= slower - {BASELINE, first}
    winner = min(
        (contenders & tied) or tied,
        key=lambda slug: (slug != first, registry.simplicity(slug)),
    )
    scores.sort(key=lambda s: (s.slug != winner, -s.log, -s.device, registry.simplicity(s.slug)))
    return [
        Ranked(
            score.slug,
            place,
            math.exp(score.log) if with_baseline else None,
            score.slug in tied,
            score.slug in beats,
            score.rows,
        )
        for place, score in enumerate(scores, 1)
    ]


def _slower_on_device(scores: Sequence[_Score]) -> set[str]:
    """Of those that are as fast for the caller, those that are not for the device: it has other
    work too, and in a CUDA graph the host's part is gone."""
    best = max(score.device for score in scores)
    return {score.slug for score in scores if score.device < best - TIE_MOST}


def _within_newest_run(rows: list[Row], mode: str) -> list[tuple[Row, float]]:
    """Where SDPA has no time, times of one run still compare: the newest run's, as logs."""
    timed = [row for row in rows if is_number(row.milliseconds(mode))]
    if not timed:
        return []
    last = max(timed, key=lambda row: (row.provenance.created_at, row.run, row.problem))
    same = [row for row in timed if row.run == last.run and row.problem == last.problem]
    return [(row, -math.log(row.milliseconds(mode) or 1.0)) for row in same]


def _held(row: Row) -> bool:
    # Parsed only where it may be there: this is asked in the first call of a process.
    if HELD not in row.provenance.details:
        return False
    try:
        details = json.loads(row.provenance.details)
    except (ValueError, RecursionError):  # a file may hold anything
        return False
    return isinstance(details, dict) and details.get(HELD) is True


def _since(held: Row, rows: Sequence[Row]) -> bool:
    """Whether any of these was measured beside `held`, or later."""
    made = held.provenance.created_at
    return any(row.run == held.run or row.provenance.created_at > made for row in rows)


def _pool(logs: list[tuple[Row, float]], mode: str) -> list[_Score]:
    by_slug: dict[str, list[tuple[Row, float]]] = {}
    for row, log in logs:
        by_slug.setdefault(row.slug, []).append((row, log))
    scores = []
    for slug, found in by_slug.items():
        found.sort(key=lambda item: item[0].problem)
        count = len(found)
        mean = math.fsum(log for _, log in found) / count
        halves = (_half_width(row.spread(mode)) for row, _ in found)
        half = max(SPREAD_FLOOR, math.sqrt(math.fsum(h * h for h in halves)) / count)
        gains = [math.log(row.speedup("graph") or math.inf) for row, _ in found]
        device = math.fsum(gains) / count if max(gains) < math.inf else -math.inf
        scores.append(_Score(slug, mean, half, device, tuple(row for row, _ in found)))
    return scores


def _half_width(spread: float | None) -> float:
    if spread is None or not math.isfinite(spread) or spread < 0:
        return SPREAD_UNKNOWN
    return max(spread, SPREAD_FLOOR)
