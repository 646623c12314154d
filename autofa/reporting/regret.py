"""What it costs not to have tuned a shape: each bucket is chosen for without its own rows."""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from autofa.device import DeviceKey, limits_of
from autofa.dispatch.explanation import RUNGS
from autofa.dispatch.ladder import Evidence, Question, Sources, refusal, resolve
from autofa.dispatch.likeness import distance
from autofa.kernels import Registry
from autofa.kernels.family import Variant
from autofa.kernels.vendor import BASELINE
from autofa.problem import Bucket
from autofa.reporting.leaderboard import BUCKET_FIELDS
from autofa.store.ranking import group, is_valid, rank
from autofa.store.rows import Row

RULES = ("dispatcher", "nearest bucket", "plain SDPA")
NOTHING = "Nothing to compare: needs buckets with two kernels measured; `autofa tune` makes them."
NOTE = (
    "Each bucket is chosen for without its own measurements, nor those that ship with autofa; "
    "regret is the chosen kernel's time over the best one's."
)

_HEADERS = ("choice", "mean", "95%", "worst", "worst bucket", "chosen there", "best there")
_ALIGN = ("left", "right", "right", "right", "left", "left", "left")
_CSV_FIELDS = (
    "device", "arch", "units", "mode", "rule", "buckets", "mean", "p95", "worst", "worst_bucket",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One bucket.

    Attributes:
        best: the fastest kernel that may answer there.
        kernels: what each of `RULES` chooses without the bucket's rows, among what has any.
        regrets: the log of each one's time over the best one's.
        beside_sdpa: the log of the dispatcher's time over plain SDPA's.
        rung: which the dispatcher's choice comes from.
    """

    bucket: Bucket
    best: str
    kernels: tuple[str, ...]
    regrets: tuple[float, ...]
    beside_sdpa: float
    rung: str


@dataclass(frozen=True)
class Regret:
    """All buckets of one device in one mode."""

    device: DeviceKey
    mode: str
    cases: tuple[Case, ...]

    def mean(self, rule: int) -> float:
        """The geometric mean of time over the best time, less 1."""
        logs = [case.regrets[rule] for case in self.cases]
        return math.expm1(math.fsum(logs) / len(logs))

    def p95(self, rule: int) -> float:
        logs = sorted(case.regrets[rule] for case in self.cases)
        at = 0.95 * (len(logs) - 1)
        low = int(at)
        high = min(low + 1, len(logs) - 1)
        return math.expm1(logs[low] + (at - low) * (logs[high] - logs[low]))

    def worst(self, rule: int) -> Case:
        return max(self.cases, key=lambda case: case.regrets[rule])


def regrets(
    rows: Iterable[Row],
    mode: str,
    registry: Registry,
    validity: Callable[[Row], str],
    buckets: Sequence[Bucket] = (),
) -> list[Regret]:
    """Per device, what each rule would choose in its buckets without their rows, and its cost.

    Libraries count as built. Buckets where plain SDPA or everything else was not measured are left
    out, and kernels that were not measured in a bucket cannot be chosen there, as their cost is
    unknown.

    Args:
        validity: a row -> `current`, `valid`, or why it may not be used.
        buckets: only these; none means all.
    """
    devices: dict[DeviceKey, dict[Bucket, list[Row]]] = {}
    for (device, bucket), members in group(rows).items():
        usable = [row for row in members if is_valid(validity(row))]
        devices.setdefault(device, {})[bucket] = usable
    found = []
    for device, measured in devices.items():
        view = _Device(device, mode, registry, measured)
        cases = [view.case(b) for b in measured if not buckets or b in buckets]
        kept = tuple(case for case in cases if case is not None)
        if kept:
            found.append(Regret(device, mode, kept))
    return found


@dataclass(frozen=True)
class _Device:
    """One device's valid rows by bucket."""

    device: DeviceKey
    mode: str
    registry: Registry
    measured: dict[Bucket, list[Row]]

    def question(self, bucket: Bucket) -> Question:
        return Question(bucket.problem, self.device, limits_of(self.device), self.mode)

    def case(self, bucket: Bucket) -> Case | None:
        question = self.question(bucket)
        logs: dict[str, float] = {}
        for place in rank(self.measured[bucket], self.mode, self.registry):
            candidate = self.registry.find(place.slug)
            if candidate is None or refusal(candidate, question) is not None:
                continue
            if place.speedup is not None:
                logs[place.slug] = math.log(place.speedup)
        if BASELINE not in logs or len(logs) < 2:
            return None
        best = max(sorted(logs), key=lambda slug: logs[slug])
        dispatched, rung = self.dispatched(question, bucket, logs)
        chosen = (dispatched, self.nearest(bucket, logs), BASELINE)
        if dispatched not in logs:  # a default that was not measured: what it costs is unknown
            return None
        costs = tuple(logs[best] - logs[slug] for slug in chosen)
        return Case(bucket, best, chosen, costs, logs[BASELINE] - logs[dispatched], rung)

    def dispatched(
        self, question: Question, bucket: Bucket, known: Container[str]
    ) -> tuple[str, str]:
        """What the ladder says, and from which rung."""
        others = {b: rows for b, rows in self.measured.items() if b != bucket}
        evidence = Evidence(lambda b: others.get(b, ()), lambda b: (), tuple(others))

        def validity(row: Row) -> str:
            own = isinstance(self.registry.find(row.slug), Variant)
            return "valid" if own or row.slug in known else f"not measured in {bucket}"

        def library_of(variant: Variant) -> Path | None:
            return Path(variant.slug) if variant.slug in known else None

        found = resolve(question, evidence, Sources(self.registry, validity, library_of))
        return found.explanation.kernel, found.explanation.rung

    def nearest(self, bucket: Bucket, known: Container[str]) -> str:
        """What is used in the nearest bucket of its dtype, head dims, mask and group; plain SDPA
        where there is none."""
        same = [b for b in self.measured if b != bucket and _kind(b) == _kind(bucket)]
        for other in sorted(same, key=lambda b: (distance(b, bucket), b))[:1]:
            for place in rank(self.measured[other], self.mode, self.registry):
                if place.slug in known and (place.beats_sdpa or place.slug == BASELINE):
                    return place.slug
        return BASELINE


def _kind(bucket: Bucket) -> tuple[object, ...]:
    b = bucket
    return b.dtype, b.head_dim, b.head_dim_v, b.mask, b.heads_q // b.heads_kv, b.device


def render_regret(found: Sequence[Regret], form: str) -> str:
    """One line per rule and device, in one of `tables.FORMATS`, ending in a newline."""
    if form == "json":
        return json.dumps([_document(regret) for regret in found], indent=1, allow_nan=False) + "\n"
    if form == "csv":
        stream = io.StringIO(newline="")
        writer = csv.writer(stream)
        writer.writerow(_CSV_FIELDS)
        for regret in found:
            key = regret.device
            for rule in range(len(RULES)):
                writer.writerow([key.name, key.arch, key.units, *_summary(regret, rule).values()])
        return stream.getvalue()
    blocks = [] if found else [NOTHING]
    for regret in found:
        rows = []
        for rule, name in enumerate(RULES):
            worst = regret.worst(rule)
            percents = (regret.mean(rule), regret.p95(rule), math.expm1(worst.regrets[rule]))
            cells = [f"{100 * value:.1f}%" for value in percents]
            rows.append([name, *cells, str(worst.bucket), worst.kernels[rule], worst.best])
        heading = f"{regret.device}, {regret.mode}, {len(regret.cases)} buckets"
        table = tabulate(
            rows,
            headers=_HEADERS,
            tablefmt=form,
            colalign=_ALIGN,
            disable_numparse=True,
        )
        if form == "html":
            blocks.append(f"<h1>{html.escape(heading)}</h1>\n{table}")
        else:
            rungs = Counter(case.rung for case in regret.cases)
            said = ", ".join(f"{rungs[rung]} {rung}" for rung in RUNGS if rungs[rung])
            slowest = math.expm1(max(case.beside_sdpa for case in regret.cases))
            blocks.append(f"{heading}\n\n{table}")
            blocks.append(
                f"The dispatcher chose from these rungs: {said}; "
                f"at worst it was {100 * slowest:+.1f}% beside plain SDPA."
            )
    if found and form != "html":
        blocks.append(NOTE)
    text = "\n\n".join(blocks) + "\n"
    if form == "html":
        return f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8">\n{text}</html>\n'
    return text


def _summary(regret: Regret, rule: int) -> dict[str, object]:
    worst = regret.worst(rule)
    return {
        "mode": regret.mode,
        "rule": RULES[rule],
        "buckets": len(regret.cases),
        "mean": regret.mean(rule),
        "p95": regret.p95(rule),
        "worst": math.expm1(worst.regrets[rule]),
        "worst_bucket": str(worst.bucket),
    }


def _document(regret: Regret) -> dict[str, object]:
    key = regret.device
    return {
        "device": key.name,
        "arch": key.arch,
        "units": key.units,
        "mode": regret.mode,
        "rules": [_summary(regret, rule) for rule in range(len(RULES))],
        "cases": [
            {
                "bucket": {name: getattr(case.bucket, name) for name in BUCKET_FIELDS},
                "best": case.best,
                "rung": case.rung,
                "beside_sdpa": math.expm1(case.beside_sdpa),
                "chosen": dict(zip(RULES, case.kernels, strict=True)),
                "regret": dict(zip(RULES, map(math.expm1, case.regrets), strict=True)),
            }
            for case in regret.cases
        ],
    }
