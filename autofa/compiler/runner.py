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


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    started = time.monotonic()
    with Path(job["log"]).open("wb") as log:
        compiler = subprocess.Popen(
            job["command"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    expired = threading.Event()

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(compiler.pid, signal.SIGKILL)

    def expire() -> None:
        expired.set()
        kill()

    def stop(signum: int, frame: FrameType | None) -> None:
        kill()
        os._exit(1)

    def follow() -> None:
        with contextlib.suppress(OSError):
            os.read(job["alive"], 1)  # returns when the building process closes it, or is gone
            kill()
            os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    timer = threading.Timer(job["timeout"], expire)
    timer.daemon = True
    timer.start()
    threading.Thread(target=follow, daemon=True).start()
    code = compiler.wait()
    timer.cancel()
    kill()  # what a compiler left running in its group
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = {
        "index": job["index"],
        "code": code,
        "expired": expired.is_set(),
        "seconds": time.monotonic() - started,
        "cpu_seconds": used.ru_utime + used.ru_stime,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
