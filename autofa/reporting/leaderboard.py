"""Stored rows as the entries of a leaderboard: ranked per bucket, flagged, nothing formatted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

from autofa.device import DeviceKey
from autofa.kernels import Registry
from autofa.problem import Bucket, Problem, bucket_of
from autofa.store.doubt import doubt
from autofa.store.ranking import CURRENT, Ranked, group, is_valid, newest, rank
from autofa.store.rows import Row

BUCKET_FIELDS = tuple(f.name for f in fields(Bucket) if f.name != "device")


@dataclass(frozen=True)
class Entry:
    """One candidate in one bucket of one device, as the report shows it.

    Attributes:
        rank: 1 is the one that is used; None unless the status is ok.
        kernel: the slug.
        title: the customary form, e.g. `mma(split-q+stage2)`.
        time_ms, call_ms, error: of the bucket's representative where it was measured, else of the
            smallest shape that was.
        tflops: at the time that the mode ranks by.
        speedup_vs_sdpa: in the mode's measure, pooled over the bucket's shapes; above 1 is faster.
        current: measured with today's kernel, torch, driver and compiler.
        usable: may be dispatched, current or not.
        tied: nothing in the bucket is faster by more than the noise.
        disturbed: other work made its times rough; the note says how.
        note: why it failed, may not be used or is rough; empty else.
    """

    device: DeviceKey
    bucket: Bucket
    rank: int | None
    kernel: str
    title: str
    family: str
    status: str
    time_ms: float | None
    call_ms: float | None
    tflops: float | None
    speedup_vs_sdpa: float | None
    error: float | None
    current: bool
    usable: bool
    tied: bool
    disturbed: bool
    note: str

    def milliseconds(self, mode: str) -> float | None:
        return self.call_ms if mode == "eager" else self.time_ms


def leaderboard(
    rows: Iterable[Row],
    mode: str,
    registry: Registry,
    validity: Callable[[Row], str],
    *,
    top: int | None = None,
    everything: bool = False,
    problems: Sequence[Problem] = (),
) -> list[Entry]:
    """The entries of all devices and buckets in `rows`: in order of device, bucket and rank.

    Args:
        validity: a row -> `current`, `valid`, or why it may not be used.
        top: at most this many ranked entries per bucket.
        everything: also candidates that failed, without a rank, and those that may not be used any
            more, ranked after the others.
        problems: only the buckets of these; none means all.
    """
    wanted = {bucket_of(problem) for problem in problems}
    view = _View(mode, registry, validity)
    found: list[Entry] = []
    for (_, bucket), members in group(rows).items():
        if not wanted or bucket in wanted:
            found += view.bucket(members, top, everything)
    return found


def winners(
    rows: Iterable[Row], mode: str, registry: Registry, validity: Callable[[Row], str]
) -> list[Entry]:
    """Per device and bucket the entry that is used."""
    return leaderboard(rows, mode, registry, validity, top=1)


def stale_count(rows: Iterable[Row], validity: Callable[[Row], str]) -> int:
    """How many ok candidates and shapes have only a row that may not be used any more."""
    return sum(row.status == "ok" and not is_valid(validity(row)) for row in newest(rows))


@dataclass(frozen=True)
class _View:
    """How rows are looked at: the mode's measure, today's kernels, which rows still hold."""

    mode: str
    registry: Registry
    validity: Callable[[Row], str]

    def bucket(self, rows: list[Row], top: int | None, everything: bool) -> Iterator[Entry]:
        """The entries of the rows of one device's bucket."""
        places = rank([r for r in rows if is_valid(self.validity(r))], self.mode, self.registry)
        yield from (self.entry(p.rows, p.rank, p) for p in places[:top])
        if not everything:
            return
        shown = {place.slug for place in places}
        stale = [row for row in rows if row.slug not in shown]
        for number, place in enumerate(rank(stale, self.mode, self.registry), len(places) + 1):
            shown.add(place.slug)
            yield self.entry(place.rows, number, place)
        failed = [row for row in newest(stale) if row.slug not in shown and row.status != "ok"]
        failed.sort(key=lambda row: (row.provenance.created_at, row.content_hash))
        latest = {row.slug: row for row in failed}
        for slug in sorted(latest):
            yield self.entry((latest[slug],), None, None)

    def entry(self, rows: tuple[Row, ...], number: int | None, place: Ranked | None) -> Entry:
        row = next((r for r in rows if r.problem == r.bucket.problem), rows[0])
        candidate = self.registry.find(row.slug)
        answer = self.validity(row)
        took = row.milliseconds(self.mode)
        rough = doubt(row, self.mode)
        return Entry(
            device=row.device,
            bucket=row.bucket,
            rank=number,
            kernel=row.slug,
            title=candidate.title if candidate is not None else row.family,
            family=row.family,
            status=row.status,
            time_ms=row.time_ms,
            call_ms=row.call_ms,
            tflops=row.problem.tflops(took) if took else None,
            speedup_vs_sdpa=place.speedup if place is not None else None,
            error=row.error,
            current=answer == CURRENT,
            usable=row.status == "ok" and is_valid(answer),
            tied=place is not None and place.tied and is_valid(answer),
            disturbed=bool(rough),
            note=row.message or (rough if is_valid(answer) else answer),
        )
