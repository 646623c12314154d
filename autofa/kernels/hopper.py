"""What the families on Hopper's wgmma and TMA share: domain, parameters and constraints."""

from __future__ import annotations

from collections.abc import Callable

from autofa.device import Limits
from autofa.kernels import mma
from autofa.kernels.family import Constraint, Domain, HeadDims, Param, Params
from autofa.problem import Problem

ROW_BYTES = 128  # of 64 columns in 16 bits: what TMA swizzles, and a product reads, as one
BARRIER_BYTES = 8
HEADS = (1, 4, 8, 16)


def groups(columns: int) -> int:
    """Groups of 64 columns, the last one filled up."""
    return -(-columns // 64)


def domain(first: int, last: int) -> Domain:
    """Head dims from `first` to `last` in steps of 8, of tensors that TMA can read."""
    return Domain(
        device="cuda",
        dtypes=("f16", "bf16"),
        head_dims=HeadDims(step=8, first=first, last=last),
        masks=("none", "causal", "causal_lower_right"),
        min_arch=90,
        max_arch=90,
        alignment=16,
    )


def stages(values: tuple[int, ...]) -> Param:
    return Param("stages", values, "s{}", about="buffers of the ring, of one chunk each")


def heads() -> Param:
    return Param("heads", HEADS, "h{}", about="heads whose tiles are taken together")


def default_heads(problem: Problem) -> int:
    """8 where a causal mask leaves tiles of unequal length, as far as there are so many."""
    if not problem.causal:
        return 1
    return max(h for h in HEADS if h <= min(8, max(1, problem.batch * problem.heads_q)))


def heads_in_turn() -> Constraint:
    return Constraint(
        "heads in turn",
        "tiles of several heads are mixed to balance a causal mask, as far as there are heads",
        lambda p, problem, limits: (
            p.heads == 1 or bool(problem.causal and p.heads <= problem.batch * problem.heads_q)
        ),
    )


def value_columns(step: int, blocks: Callable[[Params], int] = lambda p: 1) -> Constraint:
    """`blocks`: how many of a cluster share them, each with a multiple of the step."""
    return Constraint(
        "value columns",
        f"the output has the value head dim's columns, filled up to a multiple of {step} in a part",
        lambda p, problem, limits: p.columns_v == mma.columns(problem.head_dim_v, step * blocks(p)),
    )


def deepest(values: tuple[int, ...], free_bytes: int, chunk_bytes: int) -> int:
    """The most buffers that fit, each with its two barriers; 0 if none of `values` does."""
    most = free_bytes // (chunk_bytes + 2 * BARRIER_BYTES)
    return max((count for count in values if count <= most), default=0)


def no_idle_memory(most: Callable[[Params, Problem, Limits], int]) -> Constraint:
    return Constraint(
        "idle memory",
        "a block has its SM to itself, and a ring takes as much of the memory left as it can",
        lambda p, problem, limits: p.stages == most(p, problem, limits),
    )
