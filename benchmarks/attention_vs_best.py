"""`autofa.attention` beside plain SDPA and the best candidates, on every bucket that was tuned.

    python benchmarks/attention_vs_best.py [--device cuda] [--rounds 61] [--top 4]

Calls as a model makes them (wall time, host included), all in interleaved rounds; per bucket the
median of the paired ratios. The goal: attention() >= 0.98x of the best above 200 us and >= 0.93x
below, and >= 0.97x / 0.93x of plain SDPA. Exit code 1 where a bucket misses it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from tabulate import tabulate
from torch.nn.functional import scaled_dot_product_attention as sdpa

import autofa
from autofa import compiler, settings
from autofa.bench.clocks import CpuTurn, CudaTurn, Delay, copies_needed
from autofa.kernels import REGISTRY
from autofa.kernels.family import Variant
from autofa.kernels.vendor import BASELINE
from autofa.problem import Problem
from autofa.runtime import devices, kernels
from autofa.runtime.tensors import make_inputs
from autofa.store.ranking import is_valid, rank, validity
from autofa.store.repository import Repository

Call = Callable[[], object]


def candidate_calls(
    slugs: Sequence[str], inputs: Sequence[tuple[torch.Tensor, ...]], causal: bool
) -> dict[str, list[Call]]:
    """Each candidate's calls, one per copy of the inputs."""
    limits = devices.limits(inputs[0][0].device)
    found: dict[str, list[Call]] = {}
    for slug in slugs:
        candidate = REGISTRY.candidate(slug)
        library = None
        if isinstance(candidate, Variant):
            library = compiler.library_of(candidate, candidate.target(limits), settings.load())
            if library is None:
                continue
        number = kernels.load(candidate, library)
        run = torch.ops.autofa.run.default
        found[slug] = [partial(run, number, *qkv, None, causal) for qkv in inputs]
    return found


def measure(
    calls: dict[str, list[Call]], device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds per call of each, round by round."""
    delay = Delay(device) if device.type == "cuda" else None
    turns = {
        name: CpuTurn(each[0]) if delay is None else CudaTurn(each, delay)
        for name, each in calls.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            samples[name].append(turns[name]()[1])
    return samples


def row(problem: Problem, slugs: Sequence[str], device: torch.device, rounds: int) -> list[object]:
    """One line of the table; the last field says whether the goals are met."""
    copies = copies_needed(problem.bytes, device) if device.type == "cuda" else 1
    inputs = [make_inputs(problem, device, seed) for seed in range(copies)]
    causal = problem.mask == "causal"
    calls = candidate_calls(slugs, inputs, causal)
    calls["attention"] = [partial(autofa.attention, *qkv, is_causal=causal) for qkv in inputs]
    calls["sdpa"] = [partial(sdpa, *qkv, is_causal=causal) for qkv in inputs]
    samples = measure(calls, device, rounds)
    mine = samples["attention"]

    def ratio(name: str) -> float:
        return statistics.median(a / b for a, b in zip(samples[name], mine, strict=True))

    ratios = {name: ratio(name) for name in samples if name != "attention"}
    best = min(ratios, key=lambda name: ratios[name])
    took = statistics.median(mine)
    goals = (0.98, 0.97) if took > 0.2 else (0.93, 0.93)
    met = ratios[best] >= goals[0] and ratios["sdpa"] >= goals[1]
    kernel = autofa.explain(*inputs[0], is_causal=causal).kernel
    shape = f"{problem.shape} {problem.dtype} {problem.mask}"
    return [shape, kernel, took * 1e3, ratios["sdpa"], best, ratios[best], met]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default=None)
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--top", type=int, default=4, help="candidates to time beside attention()")
    arguments = parser.parse_args()
    device = devices.find_device(arguments.device)
    key = devices.device_key(device)
    with Repository.open(settings.database(settings.load()), write=False) as repository:
        rows = repository.rows(device=key, ok_only=True)
    rows = [r for r in rows if is_valid(validity(r, REGISTRY, compiler.fingerprint))]
    problems = list(dict.fromkeys(r.problem for r in rows))
    table = []
    with torch.no_grad():
        for problem in problems:
            ranked = rank([r for r in rows if r.problem == problem], "eager", REGISTRY)
            slugs = [place.slug for place in ranked[: arguments.top] if place.slug != BASELINE]
            table.append(row(problem, slugs, device, arguments.rounds))
    heads = ("shape", "kernel of attention()", "us", "x SDPA", "best of all", "x best", "goal met")
    print(tabulate(table, heads, floatfmt=".3f"))
    missed = sum(not line[-1] for line in table)
    print(f"{len(table) - missed} of {len(table)} buckets meet the goals")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
