"""Runs compiler commands, many through ninja or one by one, and yields results as they come."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autofa.errors import ToolchainError
from autofa.settings import Settings

_RUNNER = Path(__file__).with_name("runner.py")
# Isolated and without site-packages: 27 ms per command, nothing of the user's is imported.
_PYTHON = (sys.executable, "-I", "-S", str(_RUNNER))


@dataclass(frozen=True)
class Job:
    """A command to run in a build folder; its output goes to `<index>.log` there."""

    index: int
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: exit code; negative: the signal that killed it.
        expired: it was killed because its time was up.
        seconds, cpu_seconds: wall and CPU time, all its processes together.
    """

    index: int
    code: int
    expired: bool
    seconds: float
    cpu_seconds: float


def environment(settings: Settings) -> tuple[str, ...]:
    """A prefix for commands: the search path of `settings`, and English messages to read."""
    return ("/usr/bin/env", "LC_ALL=C", f"PATH={settings.search_path}")


def find_ninja(settings: Settings) -> str:
    """The path of ninja: the one beside this interpreter first, then the search path.

    Raises:
        ToolchainError: there is none.
    """
    beside = Path(sys.executable).parent / "ninja"
    found = str(beside) if beside.is_file() else shutil.which("ninja", path=settings.search_path)
    if found is None:
        raise ToolchainError(
            f"ninja: not beside {sys.executable}, not in PATH; `pip install ninja`, or build one "
            "library at a time (MAX_JOBS=1), which needs none"
        )
    return found


def log_of(folder: Path, index: int) -> str:
    """What a command printed."""
    try:
        return (folder / f"{index}.log").read_text(errors="replace")
    except OSError:
        return ""


def _write_job(folder: Path, job: Job, timeout: float, alive: int, settings: Settings) -> str:
    name = f"{job.index}.job"
    # Compilers put their intermediate files where they are removed with the build folder.
    prefix = (*environment(settings), f"TMPDIR={folder}")
    content = {
        "index": job.index,
        "command": (*prefix, *job.command),
        "log": f"{job.index}.log",
        "timeout": timeout,
        "alive": alive,
    }
    (folder / name).write_text(json.dumps(content))
    return name


def _ninja_file(names: Sequence[str]) -> str:
    runner = shlex.join(_PYTHON).replace("$", "$$")
    edges = "\n".join(f"build {name}.done: run {name}" for name in names)
    return f"rule run\n  command = {runner} $in\n{edges}\n"


def run(
    jobs: Sequence[Job], folder: Path, settings: Settings, parallel: int, timeout: float
) -> Iterator[Outcome]:
    """Runs all jobs in `folder`, `parallel` at once, each for at most `timeout` seconds.

    Yields every job's outcome once, in the order in which they end. Closing the generator, or the
    death of this process, kills what still runs. One at a time needs no ninja.

    Raises:
        ToolchainError: ninja is missing or does not work.
    """
    alive, held = os.pipe()
    try:
        names = [_write_job(folder, job, timeout, alive, settings) for job in jobs]
        if parallel == 1:
            for name in names:
                yield from _start((*_PYTHON, name), folder, alive, (name,))
        else:
            (folder / "build.ninja").write_text(_ninja_file(names))
            command = (find_ninja(settings), "-k", "0", "-j", str(parallel))
            yield from _start(command, folder, alive, names)
    finally:
        os.close(held)
        os.close(alive)


def _start(
    command: tuple[str, ...], folder: Path, alive: int, names: Sequence[str]
) -> Iterator[Outcome]:
    missing = len(names)
    said: list[str] = []
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(alive,),
        start_new_session=True,  # Ctrl-C reaches this process, which then stops the others
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    missing -= 1
                    yield Outcome(**json.loads(line))
                else:
                    said.append(line.strip())
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # ninja hands it on; the runner kills its compiler
    if missing:
        last = " ".join(said[-3:]) or f"exit code {process.returncode}"
        raise ToolchainError(f"{command[0]}: {missing} of {len(names)} commands never ran: {last}")
