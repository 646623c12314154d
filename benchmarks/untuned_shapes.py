"""What the dispatcher chooses for shapes that were never tuned, beside the best of all candidates.

    AUTOFA_DB=tuned.db python benchmarks/untuned_shapes.py [--device cpu] [--count 20] [--seed 1]
        [--most 12] [--budget 4m] [--results FILE] [--build-only cuda]

Draws shapes at random outside the database's buckets, asks the ladder what it would choose, then
measures every legal candidate of each shape into another database (`--results FILE` keeps it; run
again with the same file, it goes on), and at last the choice beside the best few. What is three
times as slow as the best leaves a timing after three rounds. `--most N` takes N variants of each
family only: the default, what the ladder considers, what won nearby, and others by chance.
`--build-only cuda` compiles what would be measured on the device of the database, which need not
be there.

`autofa report --regret` estimates the same from the tuned buckets alone. The goal: time over the
best one's 3% in the geometric mean, 10% at the 95th percentile, and never slower than plain SDPA.
Exit code 1 where it is missed, or something was not measured.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

from autofa import compiler
from autofa.bench.protocol import Plan
from autofa.device import DeviceKey, Limits, limits_of
from autofa.dispatch.inspection import explain_problem
from autofa.kernels import REGISTRY, Candidate, Registry
from autofa.kernels.family import Variant
from autofa.kernels.vendor import BASELINE
from autofa.problem import Bucket, Problem, bucket_of, check
from autofa.runtime import devices
from autofa.settings import Settings, database, load
from autofa.store.doubt import doubt
from autofa.store.ranking import Ranked, is_valid, rank, validity
from autofa.store.repository import Repository
from autofa.store.rows import Row
from autofa.tuning.contest import contest
from autofa.tuning.hardware import open_lab
from autofa.tuning.hints import Hints
from autofa.tuning.lab import Lab
from autofa.tuning.request import TuneRequest, parse_budget
from autofa.tuning.session import tune

_DTYPES = {"cuda": ("bf16", "f16"), "cpu": ("f32", "f32", "bf16")}
_HEAD_DIMS = (32, 48, 64, 64, 80, 96, 128, 128, 128, 160, 192, 256, 320, 512)
# FLOPs of one call: seconds of a CPU's time, or a few milliseconds of a GPU's.
_MOST = {"cuda": 4e12, "cpu": 5e9}
_BYTES = 4e9
# A tie is a tie: medians of one kernel in two runs differ by so much.
_NOISE = 0.02
# How many of the best the choice is timed beside, in how many rounds, and how often where other
# work disturbs it.
_BEST = 4
_ROUNDS = 21
_TIMINGS = 3


@dataclass(frozen=True)
class Few(Registry):
    """The registry, with only these variants of some problems."""

    chosen: Mapping[Problem, Sequence[Variant]] = field(default_factory=dict)

    def legal(
        self, problem: Problem, limits: Limits, families: Sequence[str] | None = None
    ) -> list[Candidate]:
        found = super().legal(problem, limits, families)
        chosen = self.chosen[problem]
        return [c for c in found if not isinstance(c, Variant) or c in chosen]


def choose(
    problem: Problem,
    limits: Limits,
    hints: Hints,
    considered: Sequence[str],
    most: int,
    seed: int,
) -> list[Variant]:
    """What is measured at a problem, of own kernels: `most` of each family. Those that add up in
    16 bits are left out, since dispatch does not use them unasked."""
    near = [variant.slug for variant in hints.near(problem)]
    found: list[Variant] = []
    for family in REGISTRY.families:
        legal = [v for v in family.legal(problem, limits) if v.accuracy(problem.dtype) != "fast"]
        rest = legal[1:]
        random.Random(f"{seed} {problem} {family.name}").shuffle(rest)
        first = {slug: place for place, slug in enumerate([*considered, *near][::-1])}
        rest.sort(key=lambda v: -first.get(v.slug, -1))
        found += [*legal[:1], *rest][:most]
    return found


def the_device(kind: str, settings: Settings) -> DeviceKey:
    """The device of that kind that the database's rows are of."""
    with Repository.open(database(settings), write=False) as repository:
        keys = {row.device for row in repository.rows() if row.device.kind == kind}
    if len(keys) != 1:
        sys.exit(f"--build-only {kind}: the database has rows of {len(keys)} such devices, not 1")
    return keys.pop()


def build(
    chosen: Mapping[Problem, Sequence[Variant]],
    limits: Limits,
    settings: Settings,
    budget_s: float | None,
) -> bool:
    """Compiles all that is chosen, shape by shape; whether it came to its end."""
    end = math.inf if budget_s is None else time.monotonic() + budget_s
    for problem, variants in chosen.items():
        requests = [(variant, variant.target(limits)) for variant in variants]
        step = 4 * compiler.default_jobs(settings, limits.kind)
        done = []
        for start in range(0, len(requests), step):
            if time.monotonic() > end:
                print("the budget is spent; the same command goes on")
                return False
            done += compiler.build(requests[start : start + step], settings)
        failed = sum(each.library is None for each in done)
        print(f"{problem.shape} {problem.dtype} {problem.mask}: {len(done)} built, {failed} failed")
    return True


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


def tuned_rows(key: DeviceKey, settings: Settings) -> list[Row]:
    """What the database that dispatch reads can answer as measured."""
    with Repository.open(database(settings), write=False) as repository:
        rows = repository.rows(device=key, ok_only=True)
    return [row for row in rows if is_valid(validity(row, REGISTRY, compiler.fingerprint))]


def less_exact(row: Row) -> bool:
    return REGISTRY.candidate(row.slug).accuracy(row.problem.dtype) == "fast"


def measure(problems: Sequence[Problem], request: TuneRequest) -> list[Row]:
    """What the request's registry has for each problem, into the request's database."""
    print(tune(request).text(told=problems), flush=True)
    with Repository.open(request.db, write=False) as repository:
        return repository.rows(ok_only=True)


def judge(
    problem: Problem, choice: str, places: Sequence[Ranked], lab: Lab, mode: str
) -> tuple[float, float, str] | None:
    """The choice's time over the best one's less 1, its speedup over plain SDPA, and the best: of
    one more run of the best few and the choice, since ratios of different runs differ by as much
    as regrets are. None where the choice cannot be timed, or never undisturbed."""
    slugs = dict.fromkeys([BASELINE, choice, *(place.slug for place in places[:_BEST])])
    candidates = [REGISTRY.candidate(slug) for slug in slugs]
    plan = Plan(mode=mode, min_rounds=_ROUNDS, max_rounds=3 * _ROUNDS, finalists=len(slugs))
    for _ in range(_TIMINGS):
        rows = [each.row for each in contest(problem, candidates, lab, plan, thorough=False)]
        speedups = {row.slug: row.speedup(mode) or 0.0 for row in rows if row.status == "ok"}
        if not speedups.get(choice):
            return None
        if not any(doubt(row, mode) for row in rows):
            best = max(speedups, key=lambda slug: speedups[slug])
            mine = speedups[choice]
            return speedups[best] / mine - 1, mine / speedups[BASELINE], best
    return None


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
    parser.add_argument("--most", type=int, default=sys.maxsize, help="variants of each family")
    parser.add_argument("--budget", type=parse_budget, default=None, metavar="90s|4m")
    parser.add_argument("--build-only", default=None, choices=("cuda", "cpu"), metavar="cuda|cpu")
    arguments = parser.parse_args()
    settings = load()
    if arguments.build_only:
        key = the_device(arguments.build_only, settings)
        limits = limits_of(key)
    else:
        device = devices.find_device(arguments.device)
        key, limits = devices.device_key(device), devices.limits(device)
    known = tuned_rows(key, settings)
    rng, taken = random.Random(arguments.seed), {row.bucket for row in known}
    problems: list[Problem] = []
    for _ in range(arguments.count):
        problems.append(draw(rng, key.kind, taken))
        taken.add(bucket_of(problems[-1]))

    hints = Hints(REGISTRY, arguments.mode)
    hints.learn(known)
    chosen = {}
    for problem in problems:
        notes = explain_problem(problem, key, limits, arguments.mode).candidates
        considered = [n.kernel for n in notes if n.status in ("ok", "predicted", "not built")]
        chosen[problem] = choose(problem, limits, hints, considered, arguments.most, arguments.seed)
    if arguments.build_only:
        sys.exit(not build(chosen, limits, settings, arguments.budget))
    print(f"{sum(map(len, chosen.values()))} own candidates of {len(problems)} shapes", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        request = TuneRequest(
            tuple(problems),
            str(device),
            arguments.results or str(Path(folder) / "untuned.db"),
            mode=arguments.mode,
            trials=sys.maxsize,
            budget_s=arguments.budget,
            registry=Few(REGISTRY.families, REGISTRY.vendors, chosen),
            settings=settings,
        )
        rows = measure(problems, request)

    lines, judged = [], []
    with open_lab(request) as lab:
        for problem in problems:
            # What is less exact is dispatched on request only.
            of_it = [r for r in rows if r.problem == problem and not less_exact(r)]
            places = rank(of_it, request.mode, REGISTRY)
            choice = explain_problem(problem, key, limits, request.mode)
            found = judge(problem, choice.kernel, places, lab, request.mode)
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
