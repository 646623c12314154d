"""`Explanation`: which kernel a call gets, from which rung of the ladder, and why."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

RUNGS = ("measured", "predicted", "seed", "default", "sdpa", "forced")


@dataclass(frozen=True)
class CandidateNote:
    """What is known of one candidate for this call.

    Attributes:
        kernel: its slug.
        status: `ok` (eligible), `predicted` (not measured there: the times are the model's),
            `refused` (its domain or the call excludes it), `stale` (measured, but with other
            sources or another library version), `not built` (faster than what answers, but its
            library is missing), or the status of its failed measurement.
        reason: why, in words; of an `ok` one, whether other work disturbed its measurement.
        time_ms, call_ms: medians of its newest measurement, or predicted; None where there is none.
            Those of different runs do not compare: clocks drift by more than kernels differ.
        speedup: plain SDPA's time over its own in the mode asked for, both from the same rounds,
            pooled over the bucket: what candidates are ordered by.
    """

    kernel: str
    status: str
    reason: str = ""
    time_ms: float | None = None
    call_ms: float | None = None
    speedup: float | None = None


@dataclass(frozen=True)
class Explanation:
    """Which kernel a call gets and why.

    Attributes:
        kernel: slug of the kernel that answers now.
        rung: one of `RUNGS`: of the ladder, or `forced` where a kernel was, past the ladder.
        reason: one sentence.
        time_ms, call_ms: its device and call time in this bucket, measured or, on the rung
            `predicted`, predicted; None if neither.
        candidates: what is known of every candidate that was considered, fastest first.
    """

    kernel: str
    rung: str
    reason: str
    time_ms: float | None = None
    call_ms: float | None = None
    candidates: tuple[CandidateNote, ...] = ()

    def to_json(self) -> str:
        """The JSON object that `autofa explain` prints."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)
