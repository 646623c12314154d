"""What one sample is: wall clock on CPU; device events and wall clock on CUDA.

CUDA: calls rotate through enough copies of the inputs that none is left in L2 from the round
before. For the device time, calls are queued behind a read of a large buffer that outlasts the
host's work, so that launch gaps do not count; then a pair of events around them divides by their
number, which leaves about a microsecond of front-end time per kernel in.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

Call = Callable[[], object]

# A CPU sample is the fastest of a few batches: what else runs on the cores only ever adds. A batch
# lasts at least so long (hundreds of times the cost of reading the clock); none starts after the
# sample's time.
_CPU_BATCH_S = 3e-4
_CPU_SAMPLE_S = 3e-3
_CPU_BATCHES = 5
# Calls shorter than this are preceded by an untimed one, which brings caches and threads back from
# the previous candidate. For longer ones it would cost more than it corrects.
_CPU_WARM_S = 5e-3

# A CUDA sample covers so much device time, for the events, and so much wall time, for the calls.
# The latter is the fastest of a few batches, as on CPU: calls of 10 us on a shared host were seen
# to take 16 for tenths of a second. None starts after the sample's time.
_CUDA_SAMPLE_MS = 0.3
_CUDA_BATCH_MS = 2.0
_CUDA_CALLS_S = 2e-3
_CUDA_BATCHES = 4
_MOST_CALLS = 64
_MOST_COPIES = 128
# Resolution of CUDA events, by the runtime's documentation.
_EVENT_MS = 5e-4


def waited_s() -> float:
    """Seconds for which threads of this process could have run and had no core, all together; 0
    where the system does not count them. Costs 20 us per thread."""
    total = 0
    for thread in Path("/proc/self/task").iterdir():
        # A thread may have ended meanwhile; its share is then lost.
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int((thread / "schedstat").read_text().split()[1])
    return total / 1e9


class CpuTurn:
    """One call on CPU; time_ms and call_ms are the same wall time."""

    resolution_ms = 1e-6

    def __init__(self, call: Call) -> None:
        self._call = call
        call()
        estimate = math.inf
        for _ in range(2):
            begin = time.perf_counter()
            call()
            estimate = min(estimate, max(time.perf_counter() - begin, 1e-7))
        self._repeats = max(1, math.ceil(_CPU_BATCH_S / estimate))
        self._warm = estimate < _CPU_WARM_S

    def __call__(self) -> tuple[float, float]:
        call, repeats = self._call, range(self._repeats)
        if self._warm:
            call()
        fastest = math.inf
        end = time.perf_counter() + _CPU_SAMPLE_S
        for _ in range(_CPU_BATCHES):
            begin = time.perf_counter()
            for _ in repeats:
                call()
            now = time.perf_counter()
            fastest = min(fastest, now - begin)
            if now > end:
                break
        elapsed = fastest * 1e3 / self._repeats
        return elapsed, elapsed


class Delay:
    """Keeps a GPU busy by reading: lines that stay behind in L2 are clean, so that no timed kernel
    pays for writing them back."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.zeros(1 << 26, dtype=torch.int32, device=device)
        self.run(3)
        self.ms = events_ms(lambda: self.run(8)) / 8

    def run(self, times: int) -> None:
        for _ in range(times):
            torch.sum(self._buffer)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def events_ms(work: Call) -> float:
    """Device time between two events around `work`, with a synchronization at the end."""
    begin, end = _event(), _event()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


class CudaTurn:
    """Calls on CUDA, one for each copy of the inputs."""

    def __init__(self, calls: Sequence[Call], delay: Delay) -> None:
        self._calls = calls
        self._next = 0
        self._delay = delay
        for _ in range(3):
            self._run(1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        device_ms = events_ms(lambda: self._run(4)) / 4
        # Enqueueing may block where the device is far behind; both are upper bounds of the truth.
        host_ms = (time.perf_counter() - begin) * 1e3 / 4
        self._repeats = min(max(math.ceil(_CUDA_SAMPLE_MS / device_ms), 2), _MOST_CALLS)
        if device_ms > 2.0:
            self._repeats = 1
        self._delays = math.ceil(min(host_ms, 0.2) * self._repeats / delay.ms) + 1
        self._batch = min(math.ceil(_CUDA_BATCH_MS / max(device_ms, 1e-3)), _MOST_CALLS)
        self.resolution_ms = _EVENT_MS / self._repeats

    def _run(self, times: int) -> None:
        calls, position = self._calls, self._next
        count = len(calls)
        for _ in range(times):
            calls[position]()
            position += 1
            if position == count:
                position = 0
        self._next = position

    def __call__(self) -> tuple[float, float]:
        begin, end = _event(), _event()
        self._run(1)
        self._delay.run(self._delays)
        begin.record()
        self._run(self._repeats)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / self._repeats, self._call_ms()

    def _call_ms(self) -> float:
        fastest = math.inf
        end = time.perf_counter() + _CUDA_CALLS_S
        for _ in range(_CUDA_BATCHES):
            begin = time.perf_counter()
            self._run(self._batch)
            torch.cuda.synchronize()
            now = time.perf_counter()
            fastest = min(fastest, now - begin)
            if now > end:
                break
        return fastest * 1e3 / self._batch


def copies_needed(input_bytes: int, device: torch.device) -> int:
    """How many copies of the inputs exceed twice the L2 cache; 1 where one does. Tiny inputs get
    fewer: they would be in L2 in real use too."""
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    return min(max(1, math.ceil(2 * cache / max(input_bytes, 1))), _MOST_COPIES)
