"""The lock of a library's folder: between processes, threads and forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from autofa.compiler.lock import Lock


def test_one_holds_it_until_it_releases_it(tmp_path: Path) -> None:
    with Lock(tmp_path) as one, Lock(tmp_path) as other:
        assert one.acquire()
        assert not other.acquire()
        assert f"process {os.getpid()}" in other.holder()
        one.release()
        one.release()
        assert other.acquire()


# A child that lives on must not keep what a thread of its parent held at the fork.
_FORK = """
import os, pathlib, signal, sys, threading
from autofa.compiler.lock import Lock
folder = pathlib.Path(sys.argv[1])
lock, taken, forked = Lock(folder), threading.Event(), threading.Event()
def hold():
    lock.acquire(); taken.set(); forked.wait(); lock.release()
thread = threading.Thread(target=hold); thread.start(); taken.wait()
(told, tell), (go, let) = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    signal.alarm(30)  # one that is left alone ends by itself
    code = 1
    try:
        os.write(tell, b"x")
        os.read(go, 1)  # until the parent has let go
        lock.release()  # of the child's copy: nothing happens
        code = 0 if Lock(folder).acquire() else 2
    finally:
        os._exit(code)
os.read(told, 1); forked.set(); thread.join()
other = Lock(folder)
assert other.acquire(), "the child keeps it"
other.release()
os.write(let, b"x")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_child_does_not_keep_it(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _FORK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
