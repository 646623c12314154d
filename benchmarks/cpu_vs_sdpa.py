"""CPU kernels beside torch's SDPA on this CPU, in one process and on the same threads.

    python benchmarks/cpu_vs_sdpa.py [--threads 1,2] [--isa v3|v4] [--dtype f32] [--quick]
                                     [--family cpu.flash] [--shape 1,32/8,1/4096,128 ...]
                                     [--variants cpu.flash-v4-k8q3-b128-f32,... | all]
                                     [--masks none,causal,bool,additive,padding]

Rounds in which SDPA and all variants take turns. A ratio is the median over the rounds of SDPA's
time divided by the variant's time in the same round (> 1: the variant is faster); the allocation
of the output is inside both. In brackets, the largest error against float64, over SDPA's.
The masks `bool` and `additive` hide 30 % of all pairs, at random; `padding` hides the last half of
the keys from all queries. `--isa v3` also holds SDPA and the libraries below it to AVX2.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

# What holds torch and its BLAS to AVX2. Read when they are loaded, so set before torch is imported.
AVX2_ONLY = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
if "v3" in sys.argv or "--isa=v3" in sys.argv:
    os.environ.update(AVX2_ONLY)

import torch  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from autofa import compiler, settings  # noqa: E402
from autofa.device import Limits, cpu_limits, named_limits  # noqa: E402
from autofa.errors import AutofaError, UsageError  # noqa: E402
from autofa.kernels import REGISTRY  # noqa: E402
from autofa.kernels.family import Variant  # noqa: E402
from autofa.problem import EXPLICIT_MASKS, Problem, parse_shape  # noqa: E402
from autofa.runtime import kernels  # noqa: E402

LENGTHS = (128, 197, 512, 1024, 2048)
QUICK_LENGTHS = (128, 512)
TORCH_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Calls of one candidate in one round take about this long, or one call.
ROUND_SECONDS = 0.002


@dataclass(frozen=True)
class Row:
    """One shape: SDPA's median time, and per variant the ratio and the relative error."""

    problem: Problem
    sdpa_ms: float
    ratios: tuple[float, ...]
    errors: tuple[float, ...]


def explicit_mask(problem: Problem, kind: str) -> torch.Tensor | None:
    p = problem
    if kind == "padding":
        return (torch.arange(p.seqlen_k) < p.seqlen_k / 2).expand(p.batch, 1, 1, p.seqlen_k)
    if kind not in EXPLICIT_MASKS:
        return None
    generator = torch.Generator().manual_seed(1)
    values = torch.randn((p.batch, 1, p.seqlen_q, p.seqlen_k), generator=generator)
    visible = values > -0.5
    if kind == "bool":
        return visible
    return values.masked_fill(~visible, -math.inf).to(TORCH_DTYPES[p.dtype])


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None
) -> torch.Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    if mask is not None:
        bias = torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask
        scores = scores + bias.double()
    return torch.softmax(scores, -1) @ v.double()


def time_rounds(calls: list[Callable[[], torch.Tensor]], rounds: int) -> list[list[float]]:
    """Seconds per call of each candidate in each round."""
    start = time.perf_counter()
    calls[-1]()
    repeat = max(1, round(ROUND_SECONDS / (time.perf_counter() - start)))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, seconds in zip(calls, samples, strict=True):
            call()
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            seconds.append((time.perf_counter() - start) / repeat)
    return samples


def compare(problem: Problem, mask: str, ids: list[int], rounds: int) -> Row:
    p = problem
    attn_mask = explicit_mask(p, mask)
    causal = mask == "causal"
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (p.batch, p.heads_q, p.seqlen_q, p.head_dim),
        (p.batch, p.heads_kv, p.seqlen_k, p.head_dim),
        (p.batch, p.heads_kv, p.seqlen_k, p.head_dim_v),
    )
    q, k, v = (
        torch.randn(shape, generator=generator).to(TORCH_DTYPES[p.dtype]) for shape in shapes
    )
    gqa = p.heads_q != p.heads_kv

    def own(kernel: int) -> Callable[[], torch.Tensor]:
        return lambda: kernels.run(
            kernel, q, k, v, attn_mask=attn_mask, is_causal=causal, enable_gqa=gqa
        )

    calls: list[Callable[[], torch.Tensor]] = [
        lambda: scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=causal, enable_gqa=gqa
        ),
        *(own(kernel) for kernel in ids),
    ]
    group = p.heads_q // p.heads_kv
    wide_k, wide_v = (t.repeat_interleave(group, 1) for t in (k, v))
    right = reference(q, wide_k, wide_v, causal, attn_mask)
    errors = [(call().double() - right).abs().max().item() for call in calls]
    sdpa, *variants = time_rounds(calls, rounds)
    return Row(
        problem,
        statistics.median(sdpa) * 1e3,
        tuple(
            statistics.median(s / o for s, o in zip(sdpa, own_times, strict=True))
            for own_times in variants
        ),
        tuple(error / (errors[0] or error or 1.0) for error in errors[1:]),
    )


def print_table(rows: list[Row], variants: list[Variant]) -> None:
    print(f"| {'B,H,N,D':>14} | SDPA ms | " + " | ".join(v.slug for v in variants) + " |")
    print("|---:|---:|" + "---:|" * len(variants))
    for row in rows:
        cells = " | ".join(
            f"{r:.2f} ({e:.1f})" for r, e in zip(row.ratios, row.errors, strict=True)
        )
        print(f"| {row.problem.shape:>14} | {row.sdpa_ms:.3f} | {cells} |")
    columns = zip(*(row.ratios for row in rows), strict=True)
    means = [statistics.geometric_mean(column) for column in columns]
    print(f"| {'geometric mean':>14} | | " + " | ".join(f"**{m:.3f}**" for m in means) + " |\n")


def problems(args: argparse.Namespace) -> list[Problem]:
    shapes = args.shape or [
        *(f"1,8,{n},{d}" for d in (64, 128) for n in (QUICK_LENGTHS if args.quick else LENGTHS)),
    ]
    return [parse_shape(s, dtype=args.dtype, device="cpu") for s in shapes]


def choose(args: argparse.Namespace, limits: Limits) -> list[Variant]:
    problem = problems(args)[0]
    family = REGISTRY.family(args.family)
    if args.variants == "all":
        return family.legal(problem, limits)
    if args.variants:
        found = [(slug, REGISTRY.find(slug)) for slug in args.variants.split(",")]
        for slug, variant in found:
            if not isinstance(variant, Variant):
                raise UsageError(f"kernel: got {slug!r}; `autofa kernels` lists the variants")
        return [variant for _, variant in found if isinstance(variant, Variant)]
    default = family.default_variant(problem, limits)
    if default is None:
        refusal = family.domain.refusal(problem, limits)
        raise UsageError(f"{family.name} does not serve {problem.shape} here: {refusal}")
    return [default]


def load(variants: list[Variant], limits: Limits) -> list[int]:
    requests = [(variant, variant.target(limits)) for variant in variants]
    ids = []
    for built in compiler.build(requests, settings.load()):
        if built.library is None:
            raise UsageError(f"{built.variant}: {built.status}: {built.message}")
        ids.append(kernels.load(built.variant, built.library))
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", help="comma-separated counts; default: 1 and all")
    parser.add_argument("--isa", choices=("v3", "v4"), help="default: the best of this machine")
    parser.add_argument("--dtype", choices=tuple(TORCH_DTYPES), default="f32")
    parser.add_argument("--masks", default="none,causal", help="none,causal,bool,additive,padding")
    parser.add_argument("--family", default="cpu.flash")
    parser.add_argument("--variants", help="slugs, or `all`; default: the default variant")
    parser.add_argument("--shape", action="append", help="as of `autofa tune`; repeatable")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--quick", action="store_true", help="two lengths, 7 rounds")
    args = parser.parse_args()
    limits = named_limits(f"x86-64-{args.isa}") if args.isa else cpu_limits()
    try:
        variants = choose(args, limits)
        ids = load(variants, limits)
    except AutofaError as error:
        sys.exit(str(error))
    counts = args.threads.split(",") if args.threads else sorted({1, torch.get_num_threads()})
    for threads in map(int, counts):
        torch.set_num_threads(threads)
        for mask in args.masks.split(","):
            print(f"{threads} thread(s), {args.dtype}, mask {mask}, torch {torch.__version__}\n")
            rounds = 7 if args.quick else args.rounds
            with torch.no_grad():
                rows = [compare(problem, mask, ids, rounds) for problem in problems(args)]
            print_table(rows, variants)


if __name__ == "__main__":
    main()
