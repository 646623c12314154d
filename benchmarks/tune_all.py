"""Wall time of a tune on all GPUs over that on one, each from an empty database and cache.

    python benchmarks/tune_all.py [--gpu-profile quick] [--within 0.6] [-- MORE OPTIONS OF tune]

Exit code 1 where the ratio exceeds `--within`, or one of the two leaves a bucket without a result
or measures one twice.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from autofa.store.repository import Repository


def timed(device: str, options: Sequence[str], folder: Path) -> float:
    """Seconds of one tune.

    Raises:
        SystemExit: it did not answer every bucket.
    """
    folder.mkdir()
    places = {"AUTOFA_DB": str(folder / "autofa.db"), "AUTOFA_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "autofa", "tune", "--device", device, *options]
    began = time.monotonic()
    done = subprocess.run(command, env={**os.environ, **places})
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"tune --device {device}: exit code {done.returncode}")
    return seconds


def measured(folder: Path) -> tuple[int, int]:
    """How many buckets have rows, and how many of them were measured by two searches: there plain
    SDPA was screened twice on one kind of device."""
    with Repository.open(str(folder / "autofa.db"), write=False) as repository:
        rows = repository.rows()
    screened = Counter(
        (row.device, row.problem)
        for row in rows
        if row.slug == "torch.sdpa" and '"screened": true' in row.provenance.details
    )
    return len({(row.device, row.problem) for row in rows}), sum(n > 1 for n in screened.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu-profile", default="quick")
    parser.add_argument("--within", type=float, default=0.6)
    parser.add_argument("more", nargs="*", help="further options of `autofa tune`, after --")
    arguments = parser.parse_args()
    options = ["--gpu-profile", arguments.gpu_profile, *arguments.more]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        one = timed("cuda:0", options, folder / "one")
        every = timed("all", options, folder / "all")
        (buckets, _), (shared, twice) = measured(folder / "one"), measured(folder / "all")
    ratio = every / one
    print(f"one GPU {one:.1f} s, {buckets} buckets; all GPUs {every:.1f} s, {shared} buckets")
    print(f"ratio {ratio:.2f}; {twice} buckets measured twice")
    return int(ratio > arguments.within or twice > 0 or shared < buckets)


if __name__ == "__main__":
    sys.exit(main())
