"""What a fleet's measurements cost to merge, report and load, as their number grows.

    python benchmarks/merge_scale.py [--machines 200] [--rows 10000 100000 1000000] [--db URL]

Makes the exports that so many machines of `--kinds` kinds would leave, merges them into a new
database by the command line, and prints per number of rows: seconds and peak memory of the merge,
of merging them again, of `export` and of `report`; the database's size; and how long the rows
keep a process's first call. With --db a server's database is filled
instead, which must be empty.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autofa.compiler import fingerprint
from autofa.device import DeviceKey, named_limits
from autofa.dispatch.evidence import gather
from autofa.kernels import REGISTRY
from autofa.kernels.family import Variant
from autofa.kernels.vendor import BASELINE
from autofa.problem import Problem, parse_shape
from autofa.settings import Settings
from autofa.store.codec import to_json
from autofa.store.rows import Provenance, Row

GPUS = (("H200", "sm_90", 132, 140), ("A100", "sm_80", 108, 80), ("L40S", "sm_89", 142, 45))
CANDIDATES = 40  # rows that a tune leaves per shape
SHAPES = tuple(
    (f"{batch},{heads},{length},{dim}", dtype, mask)
    for length in (512, 1024, 2048, 4096, 8192, 128, 256, 16384)
    for dim in (64, 128, 96, 256)
    for heads in (8, 16)
    for batch in (1, 4)
    for dtype in ("f16", "bf16")
    for mask in ("none", "causal")
)


@dataclass(frozen=True)
class Cost:
    """Of one command."""

    seconds: float
    mebibytes: float

    def __str__(self) -> str:
        return f"{self.seconds:7.1f} s {self.mebibytes:6.0f} MiB"


def device(kind: int) -> DeviceKey:
    name, arch, units, memory = GPUS[kind % len(GPUS)]
    return DeviceKey("cuda", f"NVIDIA {name} #{kind}", arch, units, memory)


Known = tuple[str, str, str]  # slug, family, fingerprint


@cache
def candidates(problem: Problem, arch: str) -> tuple[Known, ...]:
    """What a tune may have measured there, the baseline first."""
    limits = named_limits(arch)
    found = []
    for candidate in REGISTRY.legal(problem, limits):
        if isinstance(candidate, Variant):
            mark = fingerprint(candidate, candidate.target(limits))
        else:
            mark = f"{candidate.library}=={candidate.version()}"
        found.append((candidate.slug, candidate.family_name, mark))
    random.Random(problem.shape).shuffle(found)
    found.sort(key=lambda one: one[0] != BASELINE)
    return tuple(found[:CANDIDATES])


def rows_of(machine: int, kinds: int, count: int) -> Iterator[Row]:
    """What one machine exports: tunes of one shape after another, on one day."""
    draw = random.Random(machine)
    key = device(machine % kinds)
    made = 0
    for turn in range(count):
        shape, dtype, mask = SHAPES[turn % len(SHAPES)]
        problem = parse_shape(shape, dtype=dtype, mask=mask, device="cuda")
        stamp = f"2026-{1 + turn // len(SHAPES) % 12:02}-{1 + machine % 28:02}T"
        stamp += f"{machine // 28 % 24:02}:{turn % 60:02}:00+00:00"
        provenance = Provenance("0.1.0", "2.13.0", "13.0", "580.1", "nvcc 13.0.88",
                                f"node{machine}", stamp, '{"sm_clock_mhz": 1980}')  # fmt: skip
        for slug, family, mark in candidates(problem, key.arch):
            if made == count:
                return
            made += 1
            ms = 1.0 if slug == BASELINE else draw.uniform(0.4, 3.0)
            good = slug == BASELINE or draw.random() > 0.05
            time_ms = ms if good else None
            spread = 0.01 if good else None
            yield Row(
                key, problem, slug, family, mark, "ok" if good else "launch_error",
                f"{machine}-{turn}", time_ms, time_ms, spread, spread, time_ms, time_ms, time_ms,
                time_ms, 31 if good else 0, 1.0, 1.0, 1e-3 if good else None,
                "" if good else "it did not start", 0.5, provenance,
            )  # fmt: skip


def write(folder: Path, machines: int, kinds: int, rows: int) -> list[Path]:
    folder.mkdir()
    files = []
    for machine in range(machines):
        files.append(folder / f"machine-{machine}.jsonl")
        with files[-1].open("w", encoding="ascii") as file:
            each = rows_of(machine, kinds, rows // machines)
            file.writelines(f"{to_json(row)}\n" for row in each)
    return files


def run(*arguments: str) -> Cost:
    """One command of autofa in a process of its own."""
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "autofa", *arguments], stdout=subprocess.DEVNULL
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"autofa {' '.join(arguments[:2])} failed")
    return Cost(time.monotonic() - started, usage.ru_maxrss / 1024)


def first_call_ms(location: str) -> float:
    """How long the rows keep the first call of a process on the first device: its buckets, and
    those of one. The best of three."""
    costs = []
    for _ in range(3):
        started = time.perf_counter()
        evidence = gather(device(0), Settings(db=location))
        assert evidence.measured(evidence.buckets[0])
        costs.append(time.perf_counter() - started)
    return min(costs) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", type=int, default=200)
    parser.add_argument("--kinds", type=int, default=20, help="kinds of GPU among them")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--db", help="URL of an empty database to fill (one number of rows)")
    options = parser.parse_args()
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            started = time.monotonic()
            files = write(folder / "exports", options.machines, options.kinds, rows)
            print(f"{rows} rows of {options.machines} machines, "
                  f"made in {time.monotonic() - started:.0f} s", flush=True)  # fmt: skip
            location = options.db or str(folder / "fleet.db")
            names = [str(file) for file in files]
            print(f"  merge        {run('db', 'merge', *names, '--db', location)}", flush=True)
            print(f"  merge again  {run('db', 'merge', *names, '--db', location)}", flush=True)
            if not options.db:
                print(f"  size         {Path(location).stat().st_size / 2**20:7.0f} MiB")
            target = str(folder / "all.jsonl")
            print(f"  export       {run('db', 'export', target, '--db', location)}", flush=True)
            named = ("--device", str(device(0)), "--db", location)
            print(f"  report       {run('report', *named)}", flush=True)
            print(f"  first call   {first_call_ms(location):7.1f} ms", flush=True)


if __name__ == "__main__":
    main()
