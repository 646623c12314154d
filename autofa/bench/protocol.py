"""What the measuring worker and its parent say to each other. Plain data; no torch.

A message is 8 bytes of length, little endian, and a pickle of one of the records below. The worker
is told slugs, library paths and problems, never a declaration. Which candidate is running stands
in a `Scoreboard`, a shared page that outlives the worker, so that a crash finds its culprit.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import struct
from dataclasses import dataclass

from autofa.problem import Problem

_LENGTH = struct.Struct("<Q")
# A corrupted worker may write anything; no honest message comes near this size.
MAX_MESSAGE = 64 << 20


@dataclass(frozen=True)
class Timing:
    """What was measured of one candidate.

    Attributes:
        time_ms: median device time per call. call_ms: median wall time per call of back-to-back
            calls, host included. Equal on CPU.
        time_spread, call_spread: half width of the 95% interval of the median over the median
            (0.01 is 1%).
        time_quantiles, call_quantiles: the 10% and 90% quantiles in ms.
        samples: how many rounds the candidate took part in.
    """

    time_ms: float
    call_ms: float
    time_spread: float
    call_spread: float
    time_quantiles: tuple[float, float]
    call_quantiles: tuple[float, float]
    samples: int

    def of(self, mode: str) -> float:
        """The time that mode `eager` or `graph` ranks by."""
        return self.call_ms if mode == "eager" else self.time_ms


@dataclass(frozen=True)
class Outcome:
    """What became of one candidate.

    Attributes:
        slug: the candidate.
        status: `ok, launch_error, wrong_result, timeout, crashed` or `out_of_memory`.
        message: one line; empty when ok.
        error: largest absolute difference from float64 on the problem itself, where it was checked.
        timing: where it was timed.
        baseline: plain SDPA in the same rounds as `timing`. For a candidate that left early these
            are SDPA's values over the whole run, times how all others differed in its rounds.
        seconds: wall time that this candidate cost.
        values: the first values of its output on the problem itself, where it was checked.
    """

    slug: str
    status: str
    message: str = ""
    error: float | None = None
    timing: Timing | None = None
    baseline: Timing | None = None
    seconds: float = 0.0
    values: tuple[float, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True)
class TimingRun:
    """Candidates timed together.

    Attributes:
        outcomes: one for each candidate that was asked for, in that order; `torch.sdpa` as the
            last one if it was not asked for.
        rounds: rounds the finalists took part in.
        resolved: whether the order of the finalists is known (separated, or equal within the tie)
            rather than cut short by the budget.
        conditions: JSON text: clocks, temperature, throttling and load right after the last round.
    """

    outcomes: tuple[Outcome, ...]
    rounds: int
    resolved: bool
    conditions: str


@dataclass(frozen=True)
class Plan:
    """How a timing is carried out.

    Attributes:
        mode: `eager` ranks by call_ms, `graph` by time_ms.
        budget_s: the rounds stop after this long, at the end of a round.
        warm_up_s: candidates that are not made ready after so long are left out.
        screen_rounds: rounds in which all take part; slow ones leave earlier. From nine samples on
            the interval of the median leaves out the outermost ones.
        min_rounds, max_rounds: of the finalists, screening included.
        finalists: how many stay after the screening, beside the baseline.
        tie: finalists whose times differ by less (0.01 is 1%) count as equal.
        seed: of the order within each round.
    """

    mode: str = "eager"
    budget_s: float = 5.0
    warm_up_s: float = math.inf
    screen_rounds: int = 9
    min_rounds: int = 15
    max_rounds: int = 63
    finalists: int = 4
    tie: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class Subject:
    """A candidate as the worker knows it.

    Attributes:
        library: path of the compiled variant; None for a vendor kernel.
        alignment: bytes that its base pointers and strides must be multiples of.
        deterministic: whether its declaration promises the same bits for the same input.
        fast: whether it is of the accuracy class "fast" in this dtype.
    """

    slug: str
    library: str | None
    alignment: int = 1
    deterministic: bool = False
    fast: bool = False


@dataclass(frozen=True)
class Case:
    """One input that a candidate must get right.

    Attributes:
        name: for messages.
        layout: `bhnd` or `bnhd`, the order of the dimensions in memory.
        guarded: inputs are views whose surroundings hold NaN, the output one whose surroundings
            are watched; else dense tensors through the operator, as a call comes.
        logits: factor on the query, to make scores large.
        seed: of the random input.
        repeat: run twice, so that a race has a chance to show.
    """

    name: str
    problem: Problem
    layout: str = "bhnd"
    guarded: bool = True
    logits: float = 1.0
    seed: int = 0
    repeat: bool = False


@dataclass(frozen=True)
class Hello:
    """The parent's first message: where to run."""

    device: str
    threads: int
    memory_bytes: int


@dataclass(frozen=True)
class CheckRequest:
    """Answered by a `CheckReply`."""

    subject: Subject
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class CheckReply:
    """`tainted`: the worker's memory or device context may be damaged; it must be replaced."""

    outcome: Outcome
    tainted: bool


@dataclass(frozen=True)
class TimeRequest:
    """Answered by a `TimingRun`. The subjects are numbered on the scoreboard in this order."""

    subjects: tuple[Subject, ...]
    problem: Problem
    plan: Plan


@dataclass(frozen=True)
class Ready:
    """The worker's first message."""

    device: str


@dataclass(frozen=True)
class Refused:
    """Answers a request that cannot be served, whatever the candidates: `status` is `out_of_memory`
    or `launch_error`, as of an `Outcome`."""

    status: str
    text: str


@dataclass(frozen=True)
class Failed:
    """The worker itself failed, by no candidate's fault; `text` is the traceback."""

    text: str


Message = Hello | Ready | Refused | Failed | CheckRequest | CheckReply | TimeRequest | TimingRun


def encode(message: Message) -> bytes:
    """The bytes to write for one message."""
    body = pickle.dumps(message, protocol=4)
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Turns bytes as they arrive into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Message | None:
        """Takes bytes; gives the message they complete, if they do.

        Raises:
            ValueError: the bytes are no message.
        """
        self._bytes += data
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > MAX_MESSAGE:
            raise ValueError(f"a message of {length} bytes")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        try:
            message = pickle.loads(body)
        except Exception as error:  # whatever a corrupted pickle may raise
            raise ValueError(f"an unreadable message: {error!r}") from error
        if not isinstance(message, Message):
            raise ValueError(f"a message of type {type(message).__name__}")
        return message


class Scoreboard:
    """Two integers in memory that parent and worker share.

    `beat` grows with each step the worker takes; `running` is the index of the candidate whose code
    is running, -1 where it is none's. Writing costs no system call, so it disturbs no timing.
    """

    _RECORD = struct.Struct("<qq")

    def __init__(self, descriptor: int | None = None) -> None:
        """Makes a new page, or opens the one that `descriptor` refers to."""
        if descriptor is None:
            descriptor = os.memfd_create("autofa-scoreboard")
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._beat = 0

    def start(self, index: int) -> None:
        """The worker: candidate `index` starts a step."""
        self._beat += 1
        self._RECORD.pack_into(self._page, 0, self._beat, index)

    def stop(self) -> None:
        """The worker: no candidate is running."""
        self.start(-1)

    def read(self) -> tuple[int, int]:
        """The parent: (beat, running)."""
        beat, running = self._RECORD.unpack_from(self._page, 0)
        return beat, running

    def close(self) -> None:
        self._page.close()
        os.close(self.descriptor)
