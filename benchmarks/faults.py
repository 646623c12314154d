"""Kills a tune of the CPU at random moments, and says whether anything was lost by it.

    python benchmarks/faults.py [--kills 10] [--seed 0] [--shape 1,4,256,32 ...]

So many kills -9 each of the tune itself, of its measuring worker and of a compiler, at moments that
the seed draws. Every tune has a database, a folder for temporary files and a cache of its own, so
that compilers run; a tune that was killed goes on by the same command. After each kill the
database must open and pass `autofa db check`, hold every row that it held before, none twice, and
no process may be left behind. Each tune must end with the candidates that an undisturbed one
measured. All their winners are timed beside one another at the end, and none may be more than 5%
slower than the undisturbed one's. Exit code 1 where one of this is not so.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

from autofa.bench.client import Entrant
from autofa.kernels import REGISTRY
from autofa.kernels.family import Variant
from autofa.problem import Problem
from autofa.settings import load
from autofa.store.ranking import Ranked, rank
from autofa.store.repository import Repository
from autofa.store.rows import Row
from autofa.tuning.hardware import open_lab
from autofa.tuning.request import make_request

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ("1,4,256,32", "1,4,128,32")
VICTIMS = ("tune", "worker", "compiler")
COMPILERS = ("g++", "c++", "cc1plus", "as", "ld", "collect2", "clang++")
# What a process that was orphaned may take to see it and end.
PATIENCE_S = 5.0
WITHIN = 0.05
_TIMINGS = 3
Places = dict[Problem, dict[str, Ranked]]


@dataclass
class Trial:
    """One tune in a folder of its own, through as many processes as it takes."""

    folder: Path
    shapes: Sequence[str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def db(self) -> Path:
        return self.folder / "autofa.db"

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "autofa", *words, "--db", str(self.db)]

    def start(self) -> subprocess.Popen[bytes]:
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        places = {
            "AUTOFA_CACHE_DIR": str(self.folder / "cache"),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        # More trials than there are variants: all are measured, whatever the order.
        command = self.command("tune", "--device", "cpu", "--trials", "99", "--jobs", "2")
        with (self.folder / "said.txt").open("ab") as said:
            self.process = subprocess.Popen(
                [*command, *(word for shape in self.shapes for word in ("--shape", shape))],
                env={**os.environ, **places},
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        return self.process

    def rows(self) -> list[Row]:
        with Repository.open(self.db, write=False) as repository:
            return repository.rows()

    def places(self) -> Places:
        rows = self.rows()
        found = {}
        for problem in sorted({row.problem for row in rows}):
            order = rank([row for row in rows if row.problem == problem], "eager", REGISTRY)
            found[problem] = {place.slug: place for place in order}
        return found

    def processes(self) -> dict[int, tuple[str, str]]:
        """pid -> name and command of all that belong to this tune: they name its folder."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (place / "cmdline").read_bytes()
                if str(self.folder).encode() in command + (place / "environ").read_bytes():
                    found[int(place.name)] = (
                        (place / "comm").read_text().strip(),
                        command.decode(errors="replace"),
                    )
        return {pid: what for pid, what in found.items() if pid != os.getpid()}

    def find(self, victim: str) -> int | None:
        assert self.process is not None
        if victim == "tune":
            return self.process.pid
        for pid, (name, command) in self.processes().items():
            if victim == "compiler" and name in COMPILERS:
                return pid
            if victim == "worker" and "autofa.bench.worker" in command:
                return pid
        return None

    def left_over(self) -> list[str]:
        """Files of no further use, once nothing runs: of compilers, and temporary ones."""
        builds = (self.folder / "cache").glob("variants/*/.build-*")
        return [str(path) for path in (*builds, *(self.folder / "tmp").iterdir())]


@dataclass
class Account:
    """What the kills of one victim came to."""

    kills: int = 0
    moments: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)


def verify(trial: Trial, before: set[str], account: Account) -> None:
    """Looks at the database right after a kill."""
    try:
        rows = trial.rows()
    except Exception as error:  # any is the finding
        account.faults[f"does not open: {error}"] += 1
        return
    account.faults["rows lost"] += len(before - {row.content_hash for row in rows})
    same = Counter((row.problem, row.slug, row.run) for row in rows)
    account.faults["rows doubled"] += sum(count - 1 for count in same.values())
    checked = subprocess.run(trial.command("db", "check"), capture_output=True, cwd=ROOT)
    account.faults["db check fails"] += checked.returncode != 0


def ended(trial: Trial) -> list[str]:
    """Names of the processes that outlive a tune that was killed."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := trial.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [name for name, _ in left.values()]


def kill(trial: Trial, victim: str, account: Account, whole_group: bool) -> bool:
    """Whether the victim was there to be killed; the process that does the work may end by it."""
    assert trial.process is not None
    pid = trial.find(victim)
    if pid is None or trial.process.poll() is not None:
        return False
    before = {row.content_hash for row in trial.rows()} if trial.db.exists() else set()
    try:
        (os.killpg if victim == "tune" and whole_group else os.kill)(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    account.kills += 1
    account.moments.append(f"{len(before)}")
    if victim == "tune":
        trial.process.wait()
        account.faults["processes left"] += len(ended(trial))
    if trial.db.exists():
        verify(trial, before, account)
    return True


def disturb(trial: Trial, moments: dict[str, float], accounts: dict[str, Account]) -> None:
    """Runs the tune to its end; each victim is killed that many seconds after the start, or when
    the next one of its kind is there."""
    began = time.monotonic()
    process = trial.start()
    left = dict(moments)
    while process.poll() is None:
        now = time.monotonic() - began
        for victim in [v for v, at in left.items() if now >= at]:
            account = accounts[victim]
            if kill(trial, victim, account, whole_group=account.kills % 2 == 0):
                del left[victim]
                if victim == "tune":
                    process = trial.start()
        time.sleep(0.01)
    if process.returncode != 0:
        sys.exit(f"a tune failed:\n{(trial.folder / 'said.txt').read_text()}")


def compare(trial: Trial, truth: Places, account: Account) -> dict[Problem, str]:
    """Holds the end of a tune against the undisturbed one's; gives its winners."""
    now = trial.places()
    for problem, places in truth.items():
        apart = set(now.get(problem, {})) ^ set(places)
        account.faults["other candidates"] += bool(apart)
        if apart:
            print(f"{problem.shape}: measured in one of the two only: {', '.join(sorted(apart))}")
    return {problem: next(iter(places)) for problem, places in now.items() if places}


def times_of(
    winners: dict[Problem, set[str]], shapes: Sequence[str]
) -> dict[Problem, dict[str, float]]:
    """Milliseconds per call of kernels that are timed beside one another."""
    request = make_request(shapes=shapes, device="cpu", db="", settings=load())
    found: dict[Problem, dict[str, float]] = {}
    with open_lab(request) as lab:
        for problem, slugs in winners.items():
            candidates = [REGISTRY.candidate(slug) for slug in sorted(slugs)]
            own = [c for c in candidates if isinstance(c, Variant)]
            builds = lab.builder.take(own, lambda: None)
            libraries = {build.variant.slug: build.library for build in builds}
            entrants = [Entrant(c, libraries.get(c.slug)) for c in candidates]
            # The least of several medians: what else the machine does makes them longer only.
            for _ in range(_TIMINGS):
                for outcome in lab.measurer.time(entrants, problem).outcomes:
                    if outcome.timing is not None:
                        least = found.setdefault(problem, {})
                        ms = outcome.timing.call_ms
                        least[outcome.slug] = min(ms, least.get(outcome.slug, ms))
    return found


@contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="autofa-faults-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(kills: int, seed: int, shapes: Sequence[str]) -> dict[str, Account]:
    """The whole experiment."""
    draw = random.Random(seed)
    accounts = {victim: Account() for victim in VICTIMS}
    ends: list[tuple[list[str], dict[Problem, str]]] = []
    with scratch() as folder:
        quiet = Trial(folder / "undisturbed", shapes)
        began = time.monotonic()
        if quiet.start().wait() != 0:
            sys.exit((quiet.folder / "said.txt").read_text())
        whole = time.monotonic() - began
        truth = quiet.places()
        counts = ", ".join(str(len(places)) for places in truth.values())
        print(f"undisturbed: {whole:.0f} s, {counts} candidates", flush=True)
        # Compilers run in the first part.
        most = {"tune": 0.9 * whole, "worker": 0.9 * whole, "compiler": 0.3 * whole}
        number = 0
        while wanted := [v for v in VICTIMS if accounts[v].kills < kills]:
            number += 1
            moments = {victim: draw.uniform(0, most[victim]) for victim in wanted}
            trial = Trial(folder / str(number), shapes)
            done = {victim: accounts[victim].kills for victim in VICTIMS}
            disturb(trial, moments, accounts)
            hit = [victim for victim in VICTIMS if accounts[victim].kills > done[victim]]
            for victim in hit:
                winners = compare(trial, truth, accounts[victim])
                accounts[victim].faults["files left"] += len(trial.left_over())
            if hit:
                ends.append((hit, winners))
            told = ", ".join(f"{victim} at {moments[victim]:.1f} s" for victim in hit)
            print(f"tune {number}: killed {told or 'nothing'}", flush=True)
            shutil.rmtree(trial.folder)
    first = {problem: next(iter(places)) for problem, places in truth.items()}
    all_winners = {p: {slug, *(won[p] for _, won in ends if p in won)} for p, slug in first.items()}
    times = times_of(all_winners, shapes)
    for hit, won in ends:
        for problem, slug in first.items():
            same = times[problem].get(won.get(problem, ""), math.inf)
            slower = same > times[problem][slug] * (1 + WITHIN)
            for victim in hit:
                accounts[victim].faults["winner slower"] += slower
    for problem, slug in first.items():
        others = (f"{n} {ms / times[problem][slug] - 1:+.1%}" for n, ms in times[problem].items())
        print(f"{problem.shape}: {slug} won undisturbed; beside it: {', '.join(others)}")
    return accounts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="of each victim")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", dest="shapes", action="append")
    arguments = parser.parse_args()
    accounts = run(arguments.kills, arguments.seed, arguments.shapes or SHAPES)
    lines = []
    for victim, account in accounts.items():
        faults = ", ".join(f"{count} {what}" for what, count in account.faults.items() if count)
        lines.append((victim, account.kills, " ".join(account.moments), faults or "none"))
    print(tabulate(lines, ("killed", "times", "rows stored by then", "faults")))
    sys.exit(any(account.faults.total() for account in accounts.values()))


if __name__ == "__main__":
    main()
