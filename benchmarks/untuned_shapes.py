"""What the dispatcher chooses for shapes that were never tuned, beside the best of all candidates.

    AUTOFA_DB=tuned.db python benchmarks/untuned_shapes.py [--device cpu] [--count 20] [--seed 1]

Draws shapes at random outside the database's buckets, asks the ladder what it would choose, then
measures every legal candidate of each shape into another database (`--results FILE` keeps it; run
again with the same file, it goes on). `autofa report --regret` estimates the same from the tuned
buckets alone. The goal: time over the best one's 3% in the geometric mean, 10% at the 95th
percentile, and never slower than plain SDPA. Exit code 1 where it is missed.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from tabulate import tabulate

from autofa import compiler
from autofa.device import DeviceKey
from autofa.dispatch.explanation import Explanation
from autofa.dispatch.inspection import explain_problem
from autofa.kernels import REGISTRY
from autofa.kernels.vendor import BASELINE
from autofa.problem import Bucket, Problem, bucket_of, check
from autofa.runtime import devices
from autofa.settings import Settings, database, load
from autofa.store.ranking import Ranked, is_valid, rank, validity
from autofa.store.repository import Repository
from autofa.store.rows import Row
from autofa.tuning.request import TuneRequest
from autofa.tuning.session import tune

_DTYPES = {"cuda": ("bf16", "f16"), "cpu": ("f32", "f32", "bf16")}
_HEAD_DIMS = (32, 48, 64, 64, 80, 96, 128, 128, 128, 160, 192, 256, 320, 512)
# FLOPs of one call: seconds of a CPU's time, or a few milliseconds of a GPU's.
_MOST = {"cuda": 4e12, "cpu": 5e9}
_BYTES = 4e9
# A tie is a tie: medians of one kernel in two runs differ by so much.
_NOISE = 0.02


def draw(rng: random.Random, device: str, taken: Collection[Bucket]) -> Problem:
    """A shape whose bucket was not tuned: any length, a power of two or not."""
    longest = 16384 if device == "cuda" else 4096
    while True:
        heads_kv = rng.choice((1, 2, 4, 8, 8, 12, 16, 32))
        seqlen_k = round(math.exp(rng.uniform(math.log(64), math.log(longest))))
        kind = rng.choice(("square", "square", "square", "decode", "cross"))
        seqlen_q = {"square": seqlen_k, "decode": rng.choice((1, 1, 4))}.get(
            kind, round(math.exp(rng.uniform(math.log(16), math.log(longest))))
        )
        head_dim = rng.choice(_HEAD_DIMS)
        problem = Problem(
            rng.choice(_DTYPES[device]),
            rng.choice((1, 1, 2, 4, 8, 16)),
            heads_kv * rng.choice((1, 1, 1, 4)),
            heads_kv,
            seqlen_q,
            seqlen_k,
            head_dim,
            head_dim,
            rng.choice(("none", "causal")) if kind == "square" else "none",
            device,
        )
        fits = problem.flops <= _MOST[device] and problem.bytes <= _BYTES
        if fits and bucket_of(problem) not in taken:
            return check(problem)


def tuned_buckets(key: DeviceKey, settings: Settings) -> set[Bucket]:
    """What the database that dispatch reads can answer as measured."""
    with Repository.open(database(settings), write=False) as repository:
        rows = repository.rows(device=key, ok_only=True)
    return {row.bucket for row in rows if is_valid(validity(row, REGISTRY, compiler.fingerprint))}


def measure(problems: Sequence[Problem], request: TuneRequest) -> list[Row]:
    """Every legal candidate of each problem, into the request's database."""
    print(tune(request).text(told=problems), flush=True)
    with Repository.open(request.db, write=False) as repository:
        return repository.rows(ok_only=True)


def judge(places: Sequence[Ranked], choice: Explanation) -> tuple[float, float, str] | None:
    """The choice's time over the best one's less 1, its speedup over plain SDPA, and the best;
    None where a measurement is missing."""
    speedups = {place.slug: place.speedup for place in places if place.speedup is not None}
    if choice.kernel not in speedups or BASELINE not in speedups:
        return None
    best = max(speedups, key=lambda slug: speedups[slug])
    mine = speedups[choice.kernel]
    return speedups[best] / mine - 1, mine / speedups[BASELINE], best


def verdict(judged: Sequence[tuple[float, float, str]]) -> bool:
    """Prints the sums; whether the goal is met."""
    regrets = sorted(regret for regret, _, _ in judged)
    mean = math.expm1(statistics.fmean(map(math.log1p, regrets)))
    p95 = regrets[math.ceil(0.95 * len(regrets)) - 1]
    slowest = min(beside for _, beside, _ in judged)
    print(
        f"{len(judged)} shapes: regret {mean:.1%} mean, {p95:.1%} at 95%, {regrets[-1]:.1%} worst; "
        f"{slowest:.2f}x of plain SDPA at worst"
    )
    return mean <= 0.03 and p95 <= 0.10 and slowest >= 1 - _NOISE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default=None)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", default="eager", choices=("eager", "graph"))
    parser.add_argument("--results", default=None, help="database of what is measured here")
    arguments = parser.parse_args()
    settings = load()
    device = devices.find_device(arguments.device)
    key, limits = devices.device_key(device), devices.limits(device)
    rng, taken = random.Random(arguments.seed), tuned_buckets(key, settings)
    problems: list[Problem] = []
    for _ in range(arguments.count):
        problems.append(draw(rng, key.kind, taken))
        taken.add(bucket_of(problems[-1]))

    with tempfile.TemporaryDirectory() as folder:
        request = TuneRequest(
            tuple(problems),
            str(device),
            arguments.results or str(Path(folder) / "untuned.db"),
            mode=arguments.mode,
            trials=sys.maxsize,
            settings=settings,
        )
        rows = measure(problems, request)

    lines, judged = [], []
    for problem in problems:
        places = rank([row for row in rows if row.problem == problem], arguments.mode, REGISTRY)
        choice = explain_problem(problem, key, limits, arguments.mode)
        found = judge(places, choice)
        cells = ["not measured", "", ""]
        if found is not None:
            judged.append(found)
            cells = [f"{found[0]:.1%}", f"{found[1]:.2f}x", found[2]]
        shape = f"{problem.shape} {problem.dtype} {problem.mask}"
        lines.append([shape, choice.kernel, choice.rung, *cells])
    heads = ("shape", "choice", "rung", "regret", "of SDPA", "best")
    print(tabulate(lines, heads, disable_numparse=True))
    if not judged:
        sys.exit("nothing was measured")
    sys.exit(not verdict(judged) or len(judged) < len(problems))


if __name__ == "__main__":
    main()
