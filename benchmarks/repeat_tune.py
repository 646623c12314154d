"""Tunes a profile several times, each from an empty database, and says how far the results agree.

    python benchmarks/repeat_tune.py [--gpu-profile quick] [--device cpu] [--times 3] [--within 2]
        [--keep FOLDER]

One tune before the others fills the library cache. A bucket agrees where, by each tune's own
measurements, every tune's winner is as fast as its own within so many percent. Exit code 1 where a
bucket does not.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from autofa.kernels import REGISTRY
from autofa.problem import Problem
from autofa.runtime.devices import find_device
from autofa.settings import load
from autofa.store.ranking import Ranked, rank
from autofa.store.repository import Repository
from autofa.tuning.request import make_request
from autofa.tuning.session import tune

Tune = dict[Problem, dict[str, Ranked]]


def one_tune(profile: str, device: str, mode: str, db: Path) -> Tune:
    """Every problem's candidates, the winner first."""
    request = make_request(profile, device=device, mode=mode, db=str(db), settings=load())
    summary = tune(request)
    print(summary.text(told=request.problems), flush=True)
    with Repository.open(db, write=False) as repository:
        rows = repository.rows(ok_only=True)
    found = {}
    for problem in request.problems:
        order = rank([row for row in rows if row.problem == problem], mode, REGISTRY)
        found[problem] = {place.slug: place for place in order}
    return found


def loss(places: dict[str, Ranked], slug: str) -> float:
    """By how much more time than this tune's winner that kernel takes; NaN if it has not got it."""
    winner, other = next(iter(places.values())).speedup, places.get(slug)
    if winner is None or other is None or other.speedup is None:
        return math.nan
    return winner / other.speedup - 1.0


def compare(tunes: Sequence[Tune], within: float) -> tuple[list[list[object]], int]:
    """The table's lines, and how many buckets do not agree."""
    lines: list[list[object]] = []
    apart = 0
    for problem in tunes[0]:
        each = [found[problem] for found in tunes]
        winners = [next(iter(places), "") for places in each]
        losses = [loss(places, slug) for places in each if places for slug in winners]
        agrees = all(abs(value) <= within for value in losses) and len(losses) > 0
        apart += not agrees
        worst = max(losses, key=lambda value: math.inf if math.isnan(value) else abs(value))
        shape = f"{problem.shape} {problem.dtype} {problem.mask}"
        kernels = ", ".join(dict.fromkeys(winners))
        lines.append([shape, kernels, len(set(winners)) > 1, f"{worst:+.1%}", agrees])
    return lines, apart


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gpu-profile", default="quick", help="quick, default, full or a file")
    parser.add_argument("--device", default=None)
    parser.add_argument("--mode", default="eager", choices=("eager", "graph"))
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--within", type=float, default=2.0, help="percent")
    parser.add_argument("--warm", action="store_true", help="the library cache is filled already")
    parser.add_argument("--keep", type=Path, help="an empty folder for the tunes' databases")
    arguments = parser.parse_args()
    device = str(find_device(arguments.device))
    tunes = []
    for number in range(arguments.times + (not arguments.warm)):
        with tempfile.TemporaryDirectory() as folder:
            db = (arguments.keep or Path(folder)) / f"tune-{number}.db"
            found = one_tune(arguments.gpu_profile, device, arguments.mode, db)
        if number or arguments.warm:
            tunes.append(found)
    lines, apart = compare(tunes, arguments.within / 100)
    heads = ("shape", "winners", "changed", "farthest", "agrees")
    print(tabulate(lines, heads, disable_numparse=True))
    changed = sum(bool(line[2]) for line in lines)
    print(f"{len(lines) - apart} of {len(lines)} buckets agree within {arguments.within:g}%; ")
    print(f"the winner changed in {changed}")
    sys.exit(bool(apart))


if __name__ == "__main__":
    main()
