"""A tune on several devices at once: one process each, on one database.

Like devices share the buckets by their claims, so that nothing is measured twice; a process that
dies gives its claims up, and the others do its share. Unlike ones each measure all.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import IO

from autofa.device import DeviceKey
from autofa.errors import AutofaError
from autofa.problem import Problem
from autofa.runtime import devices
from autofa.store.repository import Repository
from autofa.tuning.events import BucketDone, BucketResult, Event, Notice, Summary
from autofa.tuning.hardware import compilers_beside
from autofa.tuning.member import order_of
from autofa.tuning.request import TuneRequest
from autofa.tuning.saving import LOCK_S

# The package may have been found by a changed sys.path; the child must find the same one.
_BOOT = "import sys; sys.path.append(sys.argv[1]); from autofa.tuning.member import main; main()"
_COMMAND = (sys.executable, "-c", _BOOT, str(Path(__file__).resolve().parents[2]))
_POLL_S = 0.1
# How long a process that was told to end may take: its last rows wait for the database's lock.
_PATIENCE_S = LOCK_S + 20.0
_TAIL_BYTES = 2000


@dataclass(frozen=True)
class Member:
    """One device of several.

    Attributes:
        device: as torch writes it here.
        uuid: what it is found by in another process; empty: by the same name.
    """

    device: str
    key: DeviceKey
    uuid: str = ""


@dataclass(frozen=True)
class FanoutSummary:
    """What a tune on several devices did.

    Attributes:
        kinds: per kind of device one summary, of what all devices of that kind did together.
        losses: what became of processes that did not come to their end, a line each.
        seconds: wall time.
        interrupted: the signal that stopped it; None if none did.
    """

    kinds: tuple[Summary, ...]
    losses: tuple[str, ...]
    seconds: float
    interrupted: int | None = None

    @property
    def exit_code(self) -> int:
        """As of `Summary`, over all kinds of devices."""
        if self.interrupted is not None:
            return 128 + self.interrupted
        codes = {kind.exit_code for kind in self.kinds}
        return codes.pop() if len(codes) == 1 else 3

    def text(self, told: Mapping[DeviceKey, Collection[Problem]]) -> str:
        """What was done, for people; without a line for the buckets that were `told` already."""
        kinds = (kind.text(told.get(kind.device, ())) for kind in self.kinds)
        return "\n".join((*kinds, *self.losses))


def gpus() -> tuple[Member, ...]:
    """The GPUs that this process sees, which CUDA_VISIBLE_DEVICES may restrict.

    Raises:
        DeviceError: there is none.
    """
    return tuple(
        Member(name, devices.device_key(name), devices.uuid_of(name))
        for name in devices.cuda_names()
    )


def _jobs_each(request: TuneRequest, count: int) -> int:
    """Compilers of one process of so many; at least 1, though all be more than were asked for."""
    return max(1, compilers_beside(request, count) // count)


@dataclass
class _Process:
    """One child, and what it has said."""

    member: Member
    child: subprocess.Popen[bytes]
    connection: Connection
    log: IO[bytes]
    results: dict[Problem, BucketResult] = field(default_factory=dict)
    summary: Summary | None = None
    error: AutofaError | None = None

    def take(self, message: object) -> Event | None:
        """Takes what it said; gives it back if it is an event."""
        if isinstance(message, Summary):
            self.summary = message
            self.results.update({result.problem: result for result in message.buckets})
        elif isinstance(message, AutofaError):
            self.error = message
        else:
            if isinstance(message, BucketDone):
                self.results[message.result.problem] = message.result
            return message  # type: ignore[return-value]
        return None

    def loss(self) -> str:
        """Why it did not come to its end; empty if it did."""
        if self.summary is not None:
            number = self.summary.interrupted
            return "" if number is None else f"its process got {signal.Signals(number).name}"
        if self.error is not None:
            return str(self.error)
        code = self.child.returncode
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-code).name}"
            return f"its process was ended by signal {-code}"
        size = os.fstat(self.log.fileno()).st_size
        tail = os.pread(self.log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        lines = tail.decode(errors="replace").strip().splitlines()
        return f"its process exited with status {code}: {lines[-1] if lines else 'no output'}"


def _start(member: Member, command: Sequence[str], stack: ExitStack) -> _Process:
    ours, theirs = Pipe()
    log = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  closed by the stack
    try:
        child = subprocess.Popen(
            [*command, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(theirs.fileno(),),
            # A terminal's Ctrl-C comes to this process alone, which passes it on once.
            start_new_session=True,
        )
    finally:
        theirs.close()
    stack.callback(ours.close)
    stack.callback(_end, child)
    return _Process(member, child, ours, log)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a child that still runs, with a chance to save what it has."""
    if child.poll() is None:
        child.terminate()
        _reap(child)


def _reap(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Within it, SIGINT and SIGTERM are put into the list, and interrupt nothing: half a message
    read would be a message lost. Main thread only."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fan_out(
    request: TuneRequest,
    members: Sequence[Member],
    on_event: Callable[[Member, Event], None],
    command: Sequence[str] = _COMMAND,
) -> FanoutSummary:
    """Does the request on all members at once. Its device is not looked at; its budget and its
    compilations are for all together. Call it from the main thread: SIGINT and SIGTERM end all
    processes, everything kept.

    Args:
        command: what `member.main` runs in; the socket's descriptor is its last argument.

    Raises:
        AutofaError: what ended all processes, where none came to its end.
        StoreError: the database cannot be opened or written; before any work.
    """
    began = time.monotonic()
    deadline = None if request.budget_s is None else began + request.budget_s
    # Opened before all others do, so that a new one is made and a damaged one moved aside once.
    with Repository.open(request.db, write=True, recover=True, timeout=LOCK_S) as repository:
        where = repository.where
        if repository.moved_aside is not None:
            notice = Notice(f"{where} was damaged: moved to {repository.moved_aside}")
            on_event(members[0], notice)
    like = Counter(member.key for member in members)
    shared = replace(request, jobs=_jobs_each(request, len(members)))
    if request.force:
        shared = replace(shared, since=datetime.now(timezone.utc).isoformat())
    with ExitStack() as stack:
        noted = stack.enter_context(_signals_noted())
        processes = []
        for member in members:
            process = _start(member, command, stack)
            processes.append(process)
            own = replace(shared, workers=like[member.key])
            with contextlib.suppress(OSError):  # it is dead already, and counted as lost below
                process.connection.send(order_of(own, member.device, member.uuid, deadline))
        _listen(processes, noted, on_event)
        return _summary(
            request, processes, where, time.monotonic() - began, noted[0] if noted else None
        )


def _listen(
    processes: Sequence[_Process], noted: Sequence[int], on_event: Callable[[Member, Event], None]
) -> None:
    """Passes on what the processes say until all have ended."""
    talking = {process.connection: process for process in processes}
    give_up = math.inf
    while talking:
        for connection in wait(list(talking), _POLL_S):
            assert isinstance(connection, Connection)
            process = talking[connection]
            try:
                message = connection.recv()
            except (EOFError, OSError):
                del talking[connection]
                _reap(process.child)
                if process.loss() and not noted:
                    on_event(process.member, Notice(process.loss()))
                continue
            event = process.take(message)
            if event is not None:
                on_event(process.member, event)
        if noted and give_up == math.inf:
            give_up = time.monotonic() + _PATIENCE_S
            for process in talking.values():
                process.child.send_signal(noted[0])
        if time.monotonic() > give_up:
            for process in talking.values():
                process.child.kill()


def _together(found: Sequence[BucketResult]) -> BucketResult:
    """One bucket as the processes of like devices left it."""
    best = max(found, key=lambda r: (r.winner is not None, r.complete, r.measured))
    return replace(
        best,
        measured=sum(result.measured for result in found),
        reused=min(result.reused for result in found),
        failed=sum(result.failed for result in found),
        seconds=sum(result.seconds for result in found),
    )


def _kind(
    key: DeviceKey, processes: Sequence[_Process], request: TuneRequest, where: str, seconds: float
) -> Summary:
    buckets = [
        _together(found)
        for problem in request.problems
        if (found := [p.results[problem] for p in processes if problem in p.results])
    ]
    failures: Counter[str] = Counter()
    summaries = [process.summary for process in processes if process.summary is not None]
    for summary in summaries:
        failures.update(dict(summary.failures))
    return Summary(
        device=key,
        db=where,
        buckets=tuple(buckets),
        requested=len(request.problems),
        measured=sum(result.measured for result in buckets),
        reused=sum(result.reused for result in buckets),
        failed=sum(result.failed for result in buckets),
        failures=tuple(failures.most_common()),
        seconds=seconds,
        budget_spent=any(summary.budget_spent for summary in summaries),
        toolchain=next((summary.toolchain for summary in summaries if summary.toolchain), ""),
        compiling=sum(summary.compiling for summary in summaries),
    )


def _summary(
    request: TuneRequest,
    processes: Sequence[_Process],
    where: str,
    seconds: float,
    interrupted: int | None,
) -> FanoutSummary:
    errors = [process.error for process in processes if process.error is not None]
    if len(errors) == len(processes):
        raise errors[0]
    kinds = []
    losses = []
    for key in dict.fromkeys(process.member.key for process in processes):
        own = [process for process in processes if process.member.key == key]
        done = _kind(key, own, request, where, seconds)
        kinds.append(done)
        whole = sum(result.complete for result in done.buckets) == done.requested
        for process in own:
            if interrupted is not None or not process.loss():
                continue
            rest = "the others did its share" if whole else "run the same command again to go on"
            losses.append(f"{process.member.device}: {process.loss()}; {rest}")
    if interrupted is not None:
        losses.append("interrupted; run the same command again to go on")
    return FanoutSummary(tuple(kinds), tuple(losses), seconds, interrupted)
