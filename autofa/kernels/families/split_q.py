"""`mma.split_q`: FlashAttention-2 on mma.sync, only the query rows split over the warps."""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels.family import Constraint, Domain, HeadDims, KernelFamily, Param, Params, Value
from autofa.problem import Problem


def _smem_bytes(p: Params, problem: Problem) -> int:
    """The query tile, and a key and a value tile per stage, of 2-byte elements."""
    rows: int = p.block_m + 2 * p.stages * p.block_n
    return rows * problem.head_dim * 2


def _threads(p: Params, problem: Problem) -> int:
    warps: int = p.warps
    return 32 * warps


def _registers(p: Params, problem: Problem) -> int:
    """Per thread: output and scores in f32, and what addresses and row statistics took."""
    rows: int = p.block_m // p.warps
    columns: int = problem.head_dim + p.block_n
    return rows * columns // 32 + 40


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """The best of an H200 overall, and half the rows where SMs would be left without a block.

    At head dim 128, tiles of 128 keys and 128 rows do not fit the registers; two stages then gain
    1-2% where two blocks still fit on an SM, and a block that is alone loses far more.
    """
    p = Params(block_m=128, block_n=128, warps=4, stages=1)
    blocks = problem.batch * problem.heads_q * -(-problem.seqlen_q // p.block_m)
    if problem.seqlen_q <= 64 or blocks <= 2 * limits.units:
        p.block_m = 64
    elif problem.head_dim == 128:
        p.block_n, p.stages = 64, 2
        # Each block takes 1 KiB of the SM's shared memory besides its own.
        if 2 * (_smem_bytes(p, problem) + 1024) > limits.smem_per_sm:
            p.stages = 1
    return dict(vars(p))


FAMILY = KernelFamily(
    name="mma.split_q",
    title="mma(split-q)",
    version=1,
    folder="split_q",
    entry="kernel.cuh",
    domain=Domain(
        device="cuda",
        dtypes=("f16", "bf16"),
        head_dims=HeadDims(listed=(64, 128)),
        masks=("none", "causal", "causal_lower_right"),
        min_arch=80,
        alignment=16,
        unequal_head_dims=False,
    ),
    params=(
        Param("block_m", (64, 128), "m{}", about="query rows of a thread block"),
        Param("block_n", (32, 64, 96, 128), "n{}", joined=True, about="keys of a tile"),
        Param("warps", (4, 8), "w{}", about="warps of a thread block"),
        Param("stages", (1, 2), "s{}", about="key and value tiles in flight"),
    ),
    constraints=(
        Constraint(
            "rows per warp",
            "each warp owns whole 16-row tiles",
            lambda p, problem, limits: p.block_m % (16 * p.warps) == 0,
        ),
        Constraint(
            "registers",
            "output and scores of a warp's rows stay in its registers, of which a thread has 255",
            lambda p, problem, limits: _registers(p, problem) <= 255,
        ),
        Constraint(
            "shared memory",
            "the queries and the tiles of all stages fit in one block",
            lambda p, problem, limits: _smem_bytes(p, problem) <= limits.smem_per_block,
        ),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=_threads,
)
