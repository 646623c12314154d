"""`cpu.decode`: few queries against many keys on AVX2 and AVX-512, the keys split over threads."""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels.family import Constraint, Domain, KernelFamily, Param, Params, Value
from autofa.problem import Problem

_MOST_QUERIES = 16
# Head dims up to which the default answers unmeasured: by dtype, and whether there is AVX-512.
_WIDEST = {
    ("f32", True): 512,
    ("f32", False): 256,
    ("f16", True): 256,
    ("bf16", True): 320,
}


def _isa(limits: Limits) -> str:
    return f"v{limits.capability}"


def _few_queries(p: Params, problem: Problem, limits: Limits) -> bool:
    return problem.seqlen_q <= _MOST_QUERIES


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    return {"isa": _isa(limits), "tile_rows": 4, "block_k": 256, "split_k": 512}


def _surely_faster(problem: Problem, limits: Limits) -> bool:
    """Where the default measured faster than SDPA throughout: 1.02-2.4x with up to 8 rows per key
    head, 1.3-7x with grouped heads, in f32 with AVX2 and AVX-512 and in f16 with AVX-512; 1.03-3.0x
    with head dims of 288 to 512 in f32 with AVX-512, at 1024 no more (0.92-1.01x). One query of
    head dim 128 and more against thousands of keys on one thread is bound by reading them in both
    (0.98-1.04x).

    In bf16, for which SDPA has instructions that this kernel does not use, 1.02-3.0x with 4 rows
    per key head and more and head dims of 64 to 320 with AVX-512; 0.91-1.29x with one.

    What is left out: from 9 queries on `cpu.flash` is as fast or faster; beyond 32 rows per key
    head arithmetic binds (0.9-1.5x).
    """
    p = problem
    widest = max(p.head_dim, p.head_dim_v)
    if p.dtype != "f32" and limits.capability < 4:
        return False
    if min(p.head_dim, p.head_dim_v) < 16 or widest > _WIDEST[p.dtype, limits.capability >= 4]:
        return False
    rows = p.seqlen_q * p.heads_q // p.heads_kv
    return p.seqlen_q <= 8 and (4 if p.dtype == "bf16" else 1) <= rows <= 32


FAMILY = KernelFamily(
    name="cpu.decode",
    title="cpu(decode)",
    version=1,
    folder="cpu_decode",
    entry="kernel.h",
    domain=Domain(
        device="cpu",
        dtypes=("f32", "f16", "bf16"),
        min_arch=3,
        max_arch=4,
        extra=(
            Constraint(
                "few queries",
                f"serves up to {_MOST_QUERIES} queries; with more, vectors of queries are faster",
                _few_queries,
            ),
        ),
    ),
    params=(
        Param("isa", ("v3", "v4"), about="x86-64 level: AVX2 or AVX-512"),
        Param("tile_rows", (4, 8), "r{}", about="query rows that share a read from cache"),
        Param("block_k", (128, 256), "b{}", about="keys between two rescalings"),
        Param("split_k", (256, 512, 1024, 2048), "s{}", about="keys of a task"),
    ),
    constraints=(
        Constraint(
            "isa",
            "AVX-512 is used where it is",
            lambda p, problem, limits: p.isa == _isa(limits),
        ),
    ),
    specialised=("dtype",),
    target=lambda p, limits: f"x86-64-{p.isa}",
    default=_default,
    unmeasured=_surely_faster,
)
