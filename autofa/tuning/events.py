"""What a tune says while it runs, and what it returns. Frozen values; no printing here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from autofa.device import DeviceKey
from autofa.problem import Problem


@dataclass(frozen=True)
class TuneStarted:
    """Before any work. `done` of the `buckets` are answered by the database already."""

    device: DeviceKey
    db: str
    buckets: int
    done: int


@dataclass(frozen=True)
class BucketStarted:
    """`index` counts the buckets that need work from 1 to `total`; `retime` is without a search."""

    problem: Problem
    index: int
    total: int
    retime: bool


@dataclass(frozen=True)
class Building:
    """`count` variants are being compiled and nothing else can go on until they are."""

    count: int


@dataclass(frozen=True)
class CandidateDone:
    """One candidate was checked and timed, or failed.

    Attributes:
        time_ms: device time per call; None unless ok.
        speedup: plain SDPA's time over its time in the same rounds, in the tune's mode.
        final: from the precise rounds, rather than from the screening.
        message: why it failed; empty when ok.
    """

    problem: Problem
    slug: str
    status: str
    time_ms: float | None
    speedup: float | None
    final: bool
    message: str = ""


@dataclass(frozen=True)
class BucketResult:
    """How one bucket ended.

    Attributes:
        winner: slug of the best candidate, `torch.sdpa` where nothing beats it by more than noise;
            None where nothing could be measured.
        speedup: plain SDPA's time over the winner's, in the tune's mode.
        measured: candidates that were timed now; `failed` of those tried now were not.
        reused: candidates whose stored rows stand.
        complete: False where the budget or a stop cut it short, or no compiler was there.
    """

    problem: Problem
    winner: str | None
    speedup: float | None
    measured: int
    reused: int
    failed: int
    seconds: float
    complete: bool


@dataclass(frozen=True)
class BucketDone:
    """A bucket ended; its rows are in the database."""

    result: BucketResult


@dataclass(frozen=True)
class Estimate:
    """Seconds still to go, from what the finished work has cost; `done` of `total` buckets."""

    remaining_s: float
    done: int
    total: int


@dataclass(frozen=True)
class Notice:
    """Something a person should read, once: no compiler, another tune at work, a corrupt file."""

    message: str


Event = TuneStarted | BucketStarted | Building | CandidateDone | BucketDone | Estimate | Notice
OnEvent = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Listens to nothing."""


@dataclass(frozen=True)
class Summary:
    """What a tune did.

    Attributes:
        device: where.
        db: the database's path or URL, without a password.
        buckets: one result per requested bucket that was looked at, in the order of the request.
        requested: how many buckets were asked for.
        measured, reused, failed: candidates, over all buckets.
        failures: status -> how many candidates ended so now, most frequent first.
        seconds: wall time.
        interrupted: the signal that stopped it; None if none did.
        budget_spent: whether the budget ended before the work.
        toolchain: why own kernels could not be compiled; empty if that was not the case.
        phases: (what, seconds) of the wall time: checking, timing, waiting for compilers. The rest
            is planning, saving, and waiting for other tunes.
        compiling: seconds that compilers took, one after the other; they may run beside the rest.
    """

    device: DeviceKey
    db: str
    buckets: tuple[BucketResult, ...]
    requested: int
    measured: int
    reused: int
    failed: int
    failures: tuple[tuple[str, int], ...]
    seconds: float
    interrupted: int | None = None
    budget_spent: bool = False
    toolchain: str = ""
    phases: tuple[tuple[str, float], ...] = ()
    compiling: float = 0.0

    @property
    def answered(self) -> int:
        """Requested buckets that have a dispatchable result."""
        return sum(result.winner is not None for result in self.buckets)

    @property
    def exit_code(self) -> int:
        """0 every requested bucket has a result; 3 some have none, or own kernels could not be
        compiled; 1 none has; 128 + the signal's number if stopped by one."""
        if self.interrupted is not None:
            return 128 + self.interrupted
        if not self.answered:
            return 1
        return 3 if self.answered < self.requested or self.toolchain else 0

    def __str__(self) -> str:
        return self.text()

    def _shares(self) -> str:
        whole = max(self.seconds, sum(seconds for _, seconds in self.phases), 1e-9)
        rest = whole - sum(seconds for _, seconds in self.phases)
        parts = [f"{what} {100 * s / whole:.0f}%" for what, s in (*self.phases, ("other", rest))]
        compiled = f"; compilers ran {self.compiling:.0f} s" if self.compiling >= 1 else ""
        return f"of the time: {', '.join(parts)}{compiled}"

    def text(self, told: Collection[Problem] = ()) -> str:
        """What was done, for people; without a line for the buckets that were `told` already."""
        tuned = sum(result.winner is not None and result.complete for result in self.buckets)
        partly = self.answered - tuned
        more = f" and {partly} in part" if partly else ""
        failed = f", {self.failed} failed" if self.failed else ""
        if self.failures:
            failed += f" ({', '.join(f'{count} {status}' for status, count in self.failures)})"
        lines = [
            f"{self.device}: {tuned} of {self.requested} buckets tuned{more} in "
            f"{self.seconds:.1f} s; {self.measured} candidates measured, "
            f"{self.reused} known before{failed}"
        ]
        for result in self.buckets:
            if result.problem in told:
                continue
            best = "no result" if result.winner is None else result.winner
            gain = "" if result.speedup is None else f"  {result.speedup:.2f}x of torch.sdpa"
            cut = "" if result.complete else "  (in part)"
            p = result.problem
            lines.append(f"  {p.shape} {p.dtype} {p.mask}: {best}{gain}{cut}")
        if self.measured and self.phases:
            lines.append(self._shares())
        if self.toolchain:
            lines.append(f"own kernels were not compiled: {self.toolchain}")
        if self.budget_spent:
            lines.append("the budget was spent; run the same command again to go on")
        if self.interrupted is not None:
            lines.append("interrupted; run the same command again to go on")
        return "\n".join(lines)
