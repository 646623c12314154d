"""The measuring process itself. Started by process.py; speaks protocol.py over its own pipes.

It may be killed at any moment, and candidates may crash it: it keeps nothing that matters, and
marks on the scoreboard whose code is running.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
import traceback

import torch

from autofa.bench.check import Truths, check
from autofa.bench.clocks import CpuTurn, CudaTurn, Delay, copies_needed, waited_s
from autofa.bench.environment import conditions
from autofa.bench.inputs import Inputs, another_copy
from autofa.bench.native import Kernel, ScratchError, load
from autofa.bench.protocol import (
    Case,
    CheckReply,
    CheckRequest,
    Decoder,
    Failed,
    Hello,
    Message,
    Outcome,
    Ready,
    Refused,
    Scoreboard,
    Subject,
    TimeRequest,
    TimingRun,
    encode,
)
from autofa.bench.timing import Turn, take_turns
from autofa.kernels.vendor import BASELINE
from autofa.problem import Problem

_PR_SET_PDEATHSIG = 1
# Above the limit that the parent watches, so that its clear verdict usually comes first.
_DATA_MARGIN = 512 << 20


def _one_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _context_is_broken(device: torch.device) -> bool:
    """Whether CUDA reports an error that no later call of this process will get rid of."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def classify(error: Exception, device: torch.device) -> tuple[str, str]:
    """(status, message) of what a candidate's code raised."""
    message = _one_line(error)
    if _context_is_broken(device):
        return "crashed", message
    if isinstance(error, (MemoryError, ScratchError, torch.OutOfMemoryError)):
        return "out_of_memory", message
    if isinstance(error, RuntimeError) and "can't allocate memory" in message:
        return "out_of_memory", message  # torch's allocator on CPU has no type of its own for it
    return "launch_error", message


class Session:
    """What the worker holds between requests."""

    def __init__(self, device: torch.device, board: Scoreboard) -> None:
        self.device = device
        self.board = board
        self._truths = Truths(device)
        self._kernels: dict[Subject, Kernel] = {}
        self._delay: Delay | None = None

    def _load(self, subject: Subject) -> Kernel:
        if subject not in self._kernels:
            self._kernels[subject] = load(subject)
        return self._kernels[subject]

    def check(self, request: CheckRequest) -> CheckReply | Refused:
        slug = request.subject.slug
        self.board.start(0)
        try:
            kernel = self._load(request.subject)
            result = check(kernel, request.cases, self._truths, self.board.start)
        except (RuntimeError, MemoryError) as error:
            status, message = classify(error, self.device)
            if status == "out_of_memory" and self.board.read()[1] < 0:
                return Refused(status, f"inputs and reference do not fit: {message}")
            return CheckReply(Outcome(slug, status, message), tainted=status == "crashed")
        finally:
            self.board.stop()
        status = "ok" if result.ok else "wrong_result"
        outcome = Outcome(slug, status, result.message, result.error, values=result.values)
        return CheckReply(outcome, tainted=result.wrote_outside)

    def _rotation(self, problem: Problem) -> list[Inputs]:
        inputs, _ = self._truths.inputs(Case("timing", problem, guarded=False))
        if self.device.type == "cpu":
            return [inputs]
        copies = copies_needed(problem.bytes, self.device) - 1
        return [inputs, *(another_copy(inputs) for _ in range(copies))]

    def _turn(self, kernel: Kernel, rotation: list[Inputs]) -> Turn:
        calls = [kernel.bind(inputs) for inputs in rotation]
        if self.device.type == "cpu":
            return CpuTurn(calls[0])
        if self._delay is None:
            self._delay = Delay(self.device)
        return CudaTurn(calls, self._delay)

    def time(self, request: TimeRequest) -> TimingRun | Refused:
        """Warms all up, then runs the rounds; again without a candidate whose call raised."""
        began = time.perf_counter()
        try:
            rotation = self._rotation(request.problem)
        except (RuntimeError, MemoryError) as error:
            status, message = classify(error, self.device)
            return Refused(status, f"inputs cannot be made: {message}")
        # What failed, and what there was no time for.
        untimed: dict[int, Outcome] = {}
        turns: dict[int, Turn] = {}
        baseline = [subject.slug for subject in request.subjects].index(BASELINE)
        for index, subject in sorted(enumerate(request.subjects), key=lambda i: i[0] != baseline):
            if turns and time.perf_counter() - began > request.plan.warm_up_s:
                untimed[index] = Outcome(subject.slug, "ok", "there was no time left for it")
                continue
            self.board.start(index)
            try:
                turns[index] = self._turn(self._load(subject), rotation)
            except (RuntimeError, MemoryError) as error:
                untimed[index] = self._failure(subject, error)
        running = -1

        def started(place: int) -> None:
            nonlocal running
            running = order[place]
            self.board.start(running)

        while True:
            if baseline in untimed:
                return Refused(
                    untimed[baseline].status,
                    f"plain SDPA cannot be timed: {untimed[baseline].message}",
                )
            order = sorted(turns)
            try:
                result = take_turns(
                    [turns[i] for i in order],
                    order.index(baseline),
                    request.plan,
                    started,
                    waited=waited_s,
                    own=[order.index(i) for i in order if request.subjects[i].library],
                )
                break
            except (RuntimeError, MemoryError) as error:
                untimed[running] = self._failure(request.subjects[running], error)
                del turns[running]
        self.board.stop()
        seconds = (time.perf_counter() - began) / len(request.subjects)
        timed = dict(zip(order, zip(result.timings, result.baselines, strict=True), strict=True))
        outcomes = [
            untimed[index]
            if index in untimed
            else Outcome(subject.slug, "ok", "", None, *timed[index], seconds)
            for index, subject in enumerate(request.subjects)
        ]
        state = conditions(self.device, result.waited)
        return TimingRun(tuple(outcomes), result.rounds, result.resolved, state)

    def _failure(self, subject: Subject, error: Exception) -> Outcome:
        status, message = classify(error, self.device)
        if status == "crashed":
            # The context is gone, and with it all later measurements. The scoreboard still names
            # the candidate, so the parent goes on without it in a new process.
            print(message, file=sys.stderr, flush=True)
            os._exit(1)
        return Outcome(subject.slug, status, message)


def _confine(hello: Hello, device: torch.device) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if device.type == "cpu":
        torch.set_num_threads(hello.threads)
        # CUDA reserves far more address space than it uses, so it has only the parent's watch.
        limit = hello.memory_bytes + _DATA_MARGIN
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    else:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)


def _die_with_parent(lifeline: int, bound: bool, parent: int) -> None:
    if bound:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        os.read(lifeline, 1)  # returns when the parent's end closes, however it ended
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _receive(requests: int, decoder: Decoder) -> Message | None:
    """The next message; None when the parent has closed the pipe."""
    while True:
        data = os.read(requests, 1 << 16)
        if not data:
            return None
        message = decoder.feed(data)
        if message is not None:
            return message


def _send(replies: int, message: Message) -> None:
    pending = memoryview(encode(message))
    while pending:
        pending = pending[os.write(replies, pending) :]


def _serve(requests: int, replies: int, board: Scoreboard) -> None:
    decoder = Decoder()
    hello = _receive(requests, decoder)
    if not isinstance(hello, Hello):
        return
    device = torch.device(hello.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    _confine(hello, device)
    session = Session(device, board)
    _send(replies, Ready(hello.device))
    with torch.no_grad():
        while (request := _receive(requests, decoder)) is not None:
            if isinstance(request, CheckRequest):
                _send(replies, session.check(request))
            elif isinstance(request, TimeRequest):
                _send(replies, session.time(request))


def main() -> None:
    """Arguments: package root, request pipe, reply pipe, scoreboard, lifeline, whether this process
    may be bound to its parent's thread, the parent's process id."""
    requests, replies, board, lifeline, bound, parent = map(int, sys.argv[2:])
    _die_with_parent(lifeline, bool(bound), parent)
    try:
        _serve(requests, replies, Scoreboard(board))
    except Exception:
        with contextlib.suppress(OSError):
            _send(replies, Failed(traceback.format_exc()))
        raise SystemExit(1) from None
