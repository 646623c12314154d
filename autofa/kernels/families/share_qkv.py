"""`mma.share_qkv`: query rows split over the warps; keys and values take turns in the memory
that the queries left for the registers."""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels import mma
from autofa.kernels.family import Constraint, KernelFamily, Params, Value
from autofa.problem import Problem


def _smem_bytes(p: Params, problem: Problem) -> int:
    """The query tile or, after it, a key or value tile per stage, of 2-byte elements."""
    rows: int = max(p.block_m, p.stages * p.block_n)
    return rows * mma.columns(problem.head_dim) * 2


def _registers(p: Params, problem: Problem) -> int:
    """Per thread; the queries are held too."""
    rows: int = p.block_m // p.warps
    return mma.row_warp_registers(p, problem) + rows * mma.columns(problem.head_dim) // 64


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """What was best of an H200 overall, and half the rows where SMs would be left without a block.

    From head dim 96 on, queries, scores and output of 32 rows are too much for one warp.
    """
    p = Params(block_m=128, block_n=64, warps=4, stages=2, accumulate="f32")
    wide = _registers(p, problem) <= mma.COMFORTABLE_REGISTERS and mma.rows_fit(p, problem)
    if mma.few_rows(p, problem, limits) or not wide:
        p.block_m = 64
    if _registers(p, problem) > mma.COMFORTABLE_REGISTERS:
        p.block_n = 32
    if _registers(p, problem) > mma.COMFORTABLE_REGISTERS:
        p.block_n = 16
    if mma.resident_blocks(_smem_bytes(p, problem), limits) < 2:
        p.stages = 1
    return dict(vars(p))


def _keys_fit(p: Params, problem: Problem, keys: int) -> bool:
    other = Params(block_m=p.block_m, block_n=keys, warps=p.warps)
    return _registers(other, problem) <= mma.COMFORTABLE_REGISTERS


FAMILY = KernelFamily(
    name="mma.share_qkv",
    title="mma(share-qkv)",
    version=1,
    folder="share_qkv",
    entry="kernel.cuh",
    domain=mma.domain(last_head_dim=256),
    params=(
        mma.block_m(64, 128),
        mma.block_n(16, 32, 64, 96, 128),
        mma.warps(4, 8),
        mma.stages(1, 2, 3, 4),
        mma.ACCUMULATE,
    ),
    constraints=(
        mma.ROWS_PER_WARP,
        mma.WIDE_BLOCKS,
        mma.ACCUMULATION,
        mma.registers(_registers),
        Constraint(
            "short tiles",
            "tiles of 16 keys are for head dims that leave no registers for more",
            lambda p, problem, limits: p.block_n > 16 or not _keys_fit(p, problem, 32),
        ),
        mma.shared_memory(_smem_bytes),
        mma.occupancy(_smem_bytes),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=mma.threads,
)
