"""The parent's side of the measuring worker: starts it, gives it work, survives its death.

No torch here: whoever tunes need not load it to drive a worker. Failures of candidates are data;
only a worker that cannot even start, or a bug in the worker itself, is an exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from autofa.bench.cases import cases_for
from autofa.bench.process import Death, LostError, Process
from autofa.bench.protocol import (
    CheckReply,
    CheckRequest,
    Message,
    Outcome,
    Plan,
    Refused,
    Subject,
    TimeRequest,
    TimingRun,
)
from autofa.device import Limits
from autofa.errors import LaunchError
from autofa.kernels import Candidate
from autofa.kernels.family import Variant
from autofa.kernels.vendor import BASELINE
from autofa.problem import Problem


class NoRoomError(LaunchError):
    """A problem does not fit into memory, whatever the candidate."""


@dataclass(frozen=True)
class WorkerOptions:
    """Limits of the worker.

    Attributes:
        check_timeout_s: while checking, for one candidate on one input (making the input and its
            reference is not counted).
        step_timeout_s: while timing, for one candidate's turn in one round.
        start_timeout_s: for the process to be ready (torch's import, a CUDA context).
        memory_bytes: host memory the worker may hold; None: 80% of what is available at its start.
    """

    check_timeout_s: float = 30.0
    step_timeout_s: float = 20.0
    start_timeout_s: float = 120.0
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Entrant:
    """A candidate to measure, with its compiled library; None for a vendor kernel."""

    candidate: Candidate
    library: Path | None = None


def _nothing() -> None:
    """Polls nothing."""


def _subject(entrant: Entrant, problem: Problem) -> Subject:
    candidate = entrant.candidate
    fast = candidate.accuracy(problem.dtype) == "fast"
    if not isinstance(candidate, Variant):
        return Subject(candidate.slug, None, fast=fast)
    domain = candidate.family.domain
    if entrant.library is None:
        raise LaunchError(f"{candidate.slug}: not compiled; build it before it is measured")
    library = str(entrant.library)
    return Subject(candidate.slug, library, domain.alignment, domain.deterministic, fast)


class Worker:
    """A measuring process for one device, restarted whenever a candidate brings it down.

    It starts with the first request and keeps libraries, inputs and references between requests, so
    ask for all candidates of one problem before the next problem. Use from one thread at a time;
    several workers may live side by side. The process dies with this one.

    Args:
        device: `cuda:0` or `cpu`.
        limits: of that device; `limits.units` is the number of threads on CPU.
        options: time and memory limits.

    Example:
        with Worker("cpu", limits) as worker:
            outcome = worker.check(variant, library, problem)
            run = worker.time([Entrant(variant, library)], problem)
    """

    def __init__(self, device: str, limits: Limits, options: WorkerOptions | None = None) -> None:
        self.device = device
        self.limits = limits
        self.options = options or WorkerOptions()
        self.starts = 0
        self._process: Process | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process. The worker may be used again; it then starts afresh."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def check(
        self,
        candidate: Candidate,
        library: Path | None,
        problem: Problem,
        *,
        thorough: bool = True,
        poll: Callable[[], None] = _nothing,
    ) -> Outcome:
        """Whether the candidate computes attention: on `problem` and on every odd input like it
        that its declaration serves (`cases_for`). Never raises for what the candidate does.

        Args:
            thorough: False leaves the odd inputs out.
            poll: called every few hundredths of a second while waiting; what it raises ends the
                worker's process and comes out.

        Raises:
            LaunchError: a variant without a library, or the worker process cannot start or is
                killed from outside again and again.
            NoRoomError: memory does not suffice, by no fault of the candidate's.
        """
        began = time.monotonic()
        subject = _subject(Entrant(candidate, library), problem)
        cases = cases_for(candidate, problem, self.limits)
        request = CheckRequest(subject, cases if thorough else cases[-1:])
        reply = self._ask(request, self.options.check_timeout_s, poll)
        seconds = time.monotonic() - began
        if isinstance(reply, Death):
            if reply.outside and reply.running < 0:
                raise LaunchError(f"the measuring worker was {reply.message} twice")
            if reply.status == "out_of_memory" and reply.running < 0:
                raise NoRoomError(f"making its inputs, the worker {reply.message}")
            if reply.status == "timeout" and reply.running < 0:
                raise LaunchError(
                    f"making inputs and reference for {problem.shape} {reply.message}; plain SDPA "
                    "may take too long there"
                )
            return Outcome(subject.slug, reply.status, reply.message, seconds=seconds)
        if not isinstance(reply, CheckReply):
            raise TypeError(f"the worker answered a check with {reply!r}")
        if reply.tainted:
            self.close()
        return replace(reply.outcome, seconds=seconds)

    def time(
        self,
        entrants: Sequence[Entrant],
        problem: Problem,
        plan: Plan | None = None,
        *,
        poll: Callable[[], None] = _nothing,
    ) -> TimingRun:
        """Times candidates and plain SDPA, interleaved. Time only what has passed its check.
        `poll` is as of `check`.

        A candidate that brings the worker down or does not come back is named in its outcome, and
        the others are timed again without it.

        Raises:
            LaunchError: a variant without a library, the worker cannot start, or plain SDPA cannot
                be timed.
            NoRoomError: memory does not suffice for the problem, or for plain SDPA.
        """
        plan = plan or Plan()
        subjects = [_subject(entrant, problem) for entrant in entrants]
        order = [subject.slug for subject in subjects]
        if BASELINE not in order:
            subjects.append(Subject(BASELINE, None))
            order.append(BASELINE)
        lost: dict[str, Outcome] = {}
        while True:
            began = time.monotonic()
            request = TimeRequest(tuple(subjects), problem, plan)
            reply = self._ask(request, self.options.step_timeout_s, poll)
            if not isinstance(reply, Death):
                break
            kind = NoRoomError if reply.status == "out_of_memory" else LaunchError
            if not 0 <= reply.running < len(subjects):
                raise kind(
                    f"the measuring worker died outside of any candidate: {reply.message}; "
                    f"timing {problem.shape} on {self.device}"
                )
            culprit = subjects.pop(reply.running)
            if culprit.slug == BASELINE:
                raise kind(
                    f"plain SDPA cannot be timed: {reply.message}; {problem.shape} on {self.device}"
                )
            lost[culprit.slug] = Outcome(
                culprit.slug, reply.status, reply.message, seconds=time.monotonic() - began
            )
        if not isinstance(reply, TimingRun):
            raise TypeError(f"the worker answered a timing with {reply!r}")
        found = {outcome.slug: outcome for outcome in reply.outcomes} | lost
        return replace(reply, outcomes=tuple(found[slug] for slug in order))

    def _ask(
        self, request: CheckRequest | TimeRequest, step_s: float, poll: Callable[[], None]
    ) -> Message | Death:
        """The answer. If somebody kills the worker, by no fault of a candidate's, it is asked once
        more; killed again, it is a `Death` like any other.

        Raises:
            LaunchError, NoRoomError: it cannot be served, whatever the candidates.
        """
        try:
            reply = self._running(poll).ask(request, step_s=step_s, poll=poll)
            if isinstance(reply, Death) and reply.outside:
                self.close()
                reply = self._running(poll).ask(request, step_s=step_s, poll=poll)
        except BaseException:
            self.close()
            raise
        if isinstance(reply, Death):
            self.close()
        if isinstance(reply, Refused):
            raise (NoRoomError if reply.status == "out_of_memory" else LaunchError)(reply.text)
        return reply

    def _running(self, poll: Callable[[], None]) -> Process:
        if self._process is not None and not self._process.usable:
            self.close()
        if self._process is None:
            try:
                self._process = self._start(poll)
            except LostError:
                self._process = self._start(poll)
        return self._process

    def _start(self, poll: Callable[[], None]) -> Process:
        self.starts += 1
        return Process.start(
            self.device,
            self.limits.units if self.limits.kind == "cpu" else 0,
            self.options.memory_bytes,
            self.options.start_timeout_s,
            poll,
        )
