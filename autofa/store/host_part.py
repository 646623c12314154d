"""What the host adds to a call, and what is left of the differences without it. Pure.

Calls of a few microseconds last as long as the host works on them, and that changes from run to run
by half (an H200 beside a compiler) and from sample to sample by a fifth, while device times of the
same calls agree to 1%. All own kernels go through the same steps of the host, so whatever their
calls differ by there is noise, and none is shorter than those steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TypeGuard

from autofa.kernels.family import Variant
from autofa.kernels.registry import Registry
from autofa.kernels.vendor import BASELINE
from autofa.problem import Problem
from autofa.store.rows import Row, age

# A call that takes so many times its device time lasts as long as the host works on it.
HOST_BOUND = 1.1
# One that takes so many times what the shortest of its run does has steps of its own.
OWN_STEPS = 1.25


def is_number(value: float | None) -> TypeGuard[float]:
    """Whether it is a time or a ratio of times."""
    return value is not None and math.isfinite(value) and value > 0


def logs_over_sdpa(rows: Sequence[Row], mode: str, registry: Registry) -> list[tuple[Row, float]]:
    """Logs of the speedups over plain SDPA of rows that have one, without the host's noise.

    The runs of a problem share one host's part of plain SDPA: that of the run that measured SDPA
    itself last, or else of the newest. So do own kernels, which differ by their device times then;
    and no call is shorter than the shortest: of that run, where some last as long as the host works
    on them.
    """
    if mode != "eager":
        return [(row, math.log(row.speedup(mode) or 1.0)) for row in rows]
    last: dict[Problem, Row] = {}
    for row in sorted(rows, key=lambda row: (row.slug == BASELINE, age(row), _sdpa_part(row))):
        last[row.problem] = row
    logs = {
        id(row): math.log(row.speedup(mode) or 1.0)
        + _sdpa_part(last[row.problem])
        - _sdpa_part(row)
        for row in rows
    }
    for problem, newest in last.items():
        own = [
            row
            for row in rows
            if row.problem == problem
            and is_number(row.speedup("graph"))
            and isinstance(registry.find(row.slug), Variant)
        ]
        beside = [row for row in own if row.run == newest.run] or own
        bound = _bound_by_host(own)
        free = [_part(row) for row in beside if row.slug not in bound]
        part = median(free) if free else 0.0
        shortest = max((logs[id(row)] for row in (beside if bound else own)), default=0.0)
        for row in own:
            if row.slug in bound or _part(row) <= math.log(HOST_BOUND):
                by_device = math.log(row.speedup("graph") or 1.0) + _sdpa_part(newest)
                logs[id(row)] = by_device - part * (row.slug not in bound)
            logs[id(row)] = min(logs[id(row)], shortest)
    return [(row, logs[id(row)]) for row in rows]


def _bound_by_host(own: Iterable[Row]) -> set[str]:
    """Slugs of own kernels whose calls last as long as the steps that all of them share."""
    by_run: dict[str, list[Row]] = {}
    for row in own:
        by_run.setdefault(row.run, []).append(row)
    found = set()
    for rows in by_run.values():
        # Beside plain SDPA's of the same rounds: the host may have been slower in the later ones.
        most = OWN_STEPS / max(row.speedup("eager") or 0.0 for row in rows)
        found |= {
            row.slug
            for row in rows
            if _part(row) > math.log(HOST_BOUND)
            and (row.speedup("eager") or 0.0) * most >= 1.0 - (row.call_spread or 0.0)
        }
    return found


def _part(row: Row) -> float:
    """How much longer its call took than its device time, as a log; 0 if unknown."""
    return math.log(_ratio(row.call_ms, row.time_ms))


def _ratio(call_ms: float | None, time_ms: float | None) -> float:
    return call_ms / time_ms if is_number(call_ms) and is_number(time_ms) else 1.0


def _sdpa_part(row: Row) -> float:
    """How much longer a call of plain SDPA took than its device time, as a log; 0 if unknown."""
    return math.log(_ratio(row.baseline_call_ms, row.baseline_time_ms))
