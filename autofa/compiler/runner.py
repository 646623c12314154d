"""Runs one compiler under a time limit and prints how it went. A program of its own, stdlib only.

    python -I -S runner.py JOB.json

The job names the command, its log, the limit and a pipe whose other end the building process holds.
The compiler gets a process group of its own, which is killed as a whole when the time is up, when
this program is told to stop, and when the building process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType


class Compiler:
    """The command being run, if it runs already, and why it was stopped."""

    def __init__(self) -> None:
        self.group: int | None = None
        self.stopped = False
        self.expired = False

    def kill(self) -> None:
        if self.group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, signal.SIGKILL)

    def expire(self) -> None:
        self.expired = True
        self.kill()

    def stop(self, signum: int = 0, frame: FrameType | None = None) -> None:
        self.stopped = True
        self.kill()

    def follow(self, alive: int) -> None:
        """Stops when the building process closes its end of the pipe, or is gone."""
        with contextlib.suppress(OSError):
            os.read(alive, 1)
            self.stop()


def main(path: str) -> int:
    job = json.loads(Path(path).read_text())
    compiler = Compiler()
    # Before the start, so that no moment is left in which a stop would not reach the compiler.
    signal.signal(signal.SIGTERM, compiler.stop)
    signal.signal(signal.SIGINT, compiler.stop)
    started = time.monotonic()
    with Path(job["log"]).open("wb") as log:
        process = subprocess.Popen(
            job["command"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    compiler.group = process.pid
    if compiler.stopped:
        compiler.kill()
    timer = threading.Timer(job["timeout"], compiler.expire)
    timer.daemon = True
    timer.start()
    threading.Thread(target=compiler.follow, args=(job["alive"],), daemon=True).start()
    code = process.wait()
    timer.cancel()
    compiler.kill()  # what the compiler left running in its group
    if compiler.stopped:
        return 1
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = {
        "index": job["index"],
        "code": code,
        "expired": compiler.expired,
        "seconds": time.monotonic() - started,
        "cpu_seconds": used.ru_utime + used.ru_stime,
    }
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
