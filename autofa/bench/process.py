"""The worker's process as its parent holds it: start, ask with a deadline, watch memory, kill.

Linux only. The parent never blocks on the child: it polls, and kills the child's whole process
group when a deadline or the memory limit passes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from autofa.bench import memory
from autofa.bench.protocol import Decoder, Failed, Hello, Message, Ready, Scoreboard, encode
from autofa.errors import LaunchError

# Between two looks at memory and deadlines. A look costs about 30 us, so this leaves the machine
# 99.9% alone; a page-faulting loop gains about 100 MB in that time.
_POLL_S = 0.05
_TAIL_BYTES = 2000
_PAGE = os.sysconf("SC_PAGE_SIZE")
# What people and service managers send; no candidate kills itself so.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# The package may have been found by a changed sys.path; the child must find the same one.
_BOOT = "import sys; sys.path.append(sys.argv[1]); from autofa.bench.worker import main; main()"


class WorkerError(RuntimeError):
    """A bug in the worker, with its traceback: no fault of a candidate's."""


class LostError(LaunchError):
    """The worker was killed from outside before it was ready."""


@dataclass(frozen=True)
class Death:
    """How a worker ended before it answered.

    Attributes:
        running: the index of the candidate whose code ran last, -1 where it was none's.
        outside: it was killed by somebody else, and nothing says that memory was short.
    """

    status: str
    message: str
    running: int
    outside: bool = False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Process:
    """One worker process. Made by `start`; not thread-safe."""

    def __init__(self, child: subprocess.Popen[bytes], memory_bytes: int) -> None:
        self._child = child
        self._memory_bytes = memory_bytes
        self._resident = 0
        self._oom_kills: int | None = None
        self._busy = False
        self._decoder = Decoder()
        self._log: IO[bytes]
        self._board: Scoreboard
        self._to_child = self._from_child = self._lifeline = -1

    @classmethod
    def start(
        cls,
        device: str,
        threads: int,
        memory_bytes: int | None,
        timeout_s: float,
        poll: Callable[[], None] = lambda: None,
    ) -> Process:
        """Starts a worker and waits until it is ready. `poll` is as of `ask`.

        Raises:
            LaunchError: it did not become ready.
            LostError: somebody killed it before it was.
        """
        memory_bytes = memory_bytes or int(memory.available_memory() * memory.SHARE)
        board = Scoreboard()
        requests, to_child = os.pipe()
        from_child, replies = os.pipe()
        life, lifeline = os.pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115  closed by kill()
        package_root = Path(__file__).resolve().parents[2]
        # The death signal is bound to the thread that forks: only the main thread surely outlives
        # the worker. The lifeline pipe closes with this process whichever thread it was.
        bound = int(threading.current_thread() is threading.main_thread())
        handles = (requests, replies, board.descriptor, life)
        command = [sys.executable, "-c", _BOOT, package_root, *handles, bound, os.getpid()]
        try:
            child = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=handles,
                start_new_session=True,
            )
        finally:
            for descriptor in (requests, replies, life):
                os.close(descriptor)
        process = cls(child, memory_bytes)
        process._log, process._board = log, board
        process._to_child, process._from_child, process._lifeline = to_child, from_child, lifeline
        os.set_blocking(to_child, False)
        try:
            hello = Hello(device, threads, memory_bytes)
            reply = process.ask(hello, total_s=timeout_s, poll=poll)
        except WorkerError as error:
            reply = Death("crashed", str(error).splitlines()[-1], -1)
        except BaseException:
            process.kill()
            raise
        if not isinstance(reply, Ready):
            process.kill()
            lost = isinstance(reply, Death) and reply.outside
            detail = reply.message if isinstance(reply, Death) else repr(reply)
            kind = LostError if lost else LaunchError
            raise kind(f"the measuring worker for {device} did not start: {detail}")
        return process

    @property
    def usable(self) -> bool:
        """Whether it runs and waits for a request; False after an interrupted `ask`."""
        return not self._busy and self._child.poll() is None

    def ask(
        self,
        message: Message,
        *,
        total_s: float | None = None,
        step_s: float | None = None,
        poll: Callable[[], None] = lambda: None,
    ) -> Message | Death:
        """Sends a request and waits for its answer, at most `total_s` in all and `step_s` between
        two beats of the scoreboard. After a `Death` the process is gone. `poll` is called now and
        then while waiting, and may raise; the process is then good for nothing but `kill`.

        Raises:
            WorkerError: the worker reports a failure of its own; the process is gone.
        """
        self._busy = True
        self._oom_kills = memory.oom_kills()
        pending = encode(message)
        began = beat_at = time.monotonic()
        beat = -1
        while True:
            writers = [self._to_child] if pending else []
            readable, writable, _ = select.select([self._from_child], writers, [], _POLL_S)
            if writable:
                try:
                    pending = pending[os.write(self._to_child, pending) :]
                except BrokenPipeError:
                    return self._died(None)
            if readable:
                data = os.read(self._from_child, 1 << 20)
                if not data:
                    return self._died(None)
                try:
                    reply = self._decoder.feed(data)
                except ValueError as error:
                    return self._died("crashed", f"its answer is broken: {error}")
                if isinstance(reply, Failed):
                    self.kill()
                    raise WorkerError(f"the measuring worker failed:\n{reply.text.strip()}")
                if reply is not None:
                    self._busy = False
                    return reply
                continue
            poll()
            self._look_at_memory()
            if self._resident > self._memory_bytes:
                gib = self._memory_bytes / 2**30
                return self._died("out_of_memory", f"held more than {gib:.1f} GiB of host memory")
            now = time.monotonic()
            seen, running = self._board.read()
            if seen != beat:
                beat, beat_at = seen, now
            if total_s is not None and now - began > total_s:
                return self._died("timeout", f"no answer within {total_s:g} s")
            # Between candidates the worker makes inputs, which is no candidate's fault.
            limit = None if step_s is None else step_s * (1 if running >= 0 else 10)
            if limit is not None and now - beat_at > limit:
                return self._died("timeout", f"did not return within {limit:g} s")

    def _look_at_memory(self) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{self._child.pid}/statm").read_text().split()
            self._resident = int(fields[1]) * _PAGE

    def _died(self, status: str | None, message: str = "") -> Death:
        """Ends the process if it still runs, and says what it died of."""
        _, running = self._board.read()
        outside = False
        if status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(5.0)
            code = self._child.poll()
            status, message = self._cause(code)
            outside = status == "crashed" and code is not None and -code in _FROM_OUTSIDE
        self.kill()
        return Death(status, message, running, outside)

    def _cause(self, code: int | None) -> tuple[str, str]:
        tail = self._tail()
        if code is None:
            return "crashed", "closed its pipes without an answer"
        if code >= 0:
            last = tail.splitlines()[-1] if tail else "no output"
            return "crashed", f"exited with status {code}: {last}"
        name = _signal_name(-code)
        if code == -signal.SIGKILL and self._memory_was_short():
            return "out_of_memory", "killed by the system for want of memory"
        if -code in _FROM_OUTSIDE:
            return "crashed", f"killed by {name} from outside"
        # The data limit makes malloc fail a little above the watched limit; few kernels ask.
        if "bad_alloc" in tail or self._resident > 0.8 * self._memory_bytes:
            return "out_of_memory", f"died of {name} when memory ran out"
        return "crashed", f"died of {name}"

    def _memory_was_short(self) -> bool:
        killed = memory.oom_kills()
        if killed is not None and self._oom_kills is not None and killed > self._oom_kills:
            return True
        return self._resident > 0.8 * self._memory_bytes

    def _tail(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        offset = max(size - _TAIL_BYTES, 0)
        return os.pread(self._log.fileno(), _TAIL_BYTES, offset).decode(errors="replace").strip()

    def kill(self) -> None:
        """Kills the whole process group. Safe to call twice."""
        if self._lifeline < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        for descriptor in (self._to_child, self._from_child, self._lifeline):
            os.close(descriptor)
        self._lifeline = -1
        self._log.close()
        self._board.close()
