"""Outcomes of builds, checks and timings as rows of the database."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace

from autofa.bench.protocol import Outcome, Timing, TimingRun
from autofa.kernels.family import Variant
from autofa.kernels.registry import Candidate
from autofa.problem import Problem
from autofa.store.doubt import MOST_WAITED, TOO_WIDE, number
from autofa.store.ranking import HELD, newest
from autofa.store.rows import Row
from autofa.tuning.lab import Lab


def fingerprint_of(candidate: Candidate, lab: Lab) -> str:
    """What a row of this candidate must carry to be valid later."""
    if isinstance(candidate, Variant):
        return lab.fingerprint(candidate, candidate.target(lab.limits))
    return f"{candidate.library}=={candidate.version()}"


def record(
    lab: Lab,
    problem: Problem,
    candidate: Candidate,
    outcome: Outcome,
    *,
    run: str,
    error: float | None = None,
    conditions: str = "{}",
) -> Row:
    """One row, made now.

    Args:
        run: the id that candidates timed together share.
        error: what the check found, where `outcome` is of a timing.
        conditions: JSON text about the machine while it was timed.
    """
    timing = outcome.timing if outcome.ok else None
    baseline = outcome.baseline if timing is not None else None
    low_time, high_time = timing.time_quantiles if timing else (None, None)
    low_call, high_call = timing.call_quantiles if timing else (None, None)
    made = replace(
        lab.today,
        compiler=lab.today.compiler if isinstance(candidate, Variant) else "",
        created_at=lab.clock.now(),
        details=conditions,
    )
    return Row(
        device=lab.device,
        problem=problem,
        slug=candidate.slug,
        family=candidate.family_name,
        fingerprint=fingerprint_of(candidate, lab),
        status=outcome.status,
        run=run,
        time_ms=timing.time_ms if timing else None,
        call_ms=timing.call_ms if timing else None,
        time_spread=timing.time_spread if timing else None,
        call_spread=timing.call_spread if timing else None,
        time_p10=low_time,
        time_p90=high_time,
        call_p10=low_call,
        call_p90=high_call,
        samples=timing.samples if timing else 0,
        baseline_time_ms=baseline.time_ms if baseline else None,
        baseline_call_ms=baseline.call_ms if baseline else None,
        error=outcome.error if error is None else error,
        message=outcome.message,
        seconds=outcome.seconds,
        provenance=made,
    )


_SCREENED = "screened"
_FEW_SAMPLES = 6


def conditions_of(run: TimingRun, *, final: bool) -> str:
    """What the rows of a timing say of it: the conditions, plain SDPA's spreads, and whether their
    times are those of a screening, not of precise rounds."""
    details = json.loads(run.conditions)
    baseline = _baseline(run)
    if baseline is not None:
        details["baseline_time_spread"] = round(baseline.time_spread, 4)
        details["baseline_call_spread"] = round(baseline.call_spread, 4)
    if not final:
        details[_SCREENED] = True
    return json.dumps(details, sort_keys=True)


def _baseline(run: TimingRun) -> Timing | None:
    found = [o.baseline for o in run.outcomes if o.baseline is not None]
    return max(found, key=lambda timing: timing.samples, default=None)


def disturbance(run: TimingRun, mode: str) -> float:
    """How far a timing is from being usable, by what `store.doubt` asks of its rows: above 1 it
    should be repeated. Few samples, of calls that take long, are no disturbance."""
    waited = number(json.loads(run.conditions), "waited") / MOST_WAITED
    baseline = _baseline(run)
    if baseline is None or baseline.samples < _FEW_SAMPLES:
        return waited
    spread = baseline.call_spread if mode == "eager" else baseline.time_spread
    return max(waited, spread / TOO_WIDE)


def as_held(row: Row) -> Row:
    """The row of what won before an upgrade: among the tied it stays the winner."""
    details = {**json.loads(row.provenance.details), HELD: True}
    made = replace(row.provenance, details=json.dumps(details, sort_keys=True))
    return replace(row, provenance=made)


def is_screened(row: Row) -> bool:
    """Whether its times are those of a screening, not of precise rounds."""
    return _SCREENED in json.loads(row.provenance.details)


def cost(row: Row) -> float | None:
    """What the search minimises: log of the device time over plain SDPA's in the same rounds; the
    time's own log where SDPA has none. None for what failed. Own kernels differ by nothing else
    (`store.host_part`)."""
    if row.status != "ok":
        return None
    speedup = row.speedup("graph")
    if speedup is not None:
        return -math.log(speedup)
    return math.log(row.time_ms) if row.time_ms else None


def newest_by_slug(rows: Iterable[Row], problem: Problem) -> dict[str, Row]:
    """The newest row of each candidate at exactly this problem."""
    return {row.slug: row for row in newest(row for row in rows if row.problem == problem)}
