"""`mma.share_kv`: query rows split over the warps; keys and values take turns in one ring."""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels import mma
from autofa.kernels.family import KernelFamily, Params, Value
from autofa.problem import Problem


def _smem_bytes(p: Params, problem: Problem) -> int:
    """The query tile, and a key or value tile per stage, of 2-byte elements."""
    rows: int = p.block_m + p.stages * p.block_n
    return rows * mma.columns(problem.head_dim) * 2


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """What was best of an H200 overall, and half the rows where SMs would be left without a block.

    At head dim 128, 64 keys fit the registers, but not without spilling under every mask.
    """
    p = Params(block_m=128, block_n=64, warps=4, stages=2, accumulate="f32")
    if mma.few_rows(p, problem, limits) or not mma.rows_fit(p, problem):
        p.block_m = 64
    elif mma.row_warp_registers(p, problem) > mma.COMFORTABLE_REGISTERS:
        p.block_n, p.stages = 32, 3
    if mma.resident_blocks(_smem_bytes(p, problem), limits) < 2:
        p.block_n, p.stages = 32, 1
    return dict(vars(p))


FAMILY = KernelFamily(
    name="mma.share_kv",
    title="mma(share-kv)",
    version=1,
    folder="share_kv",
    entry="kernel.cuh",
    domain=mma.domain(last_head_dim=256),
    params=(
        mma.block_m(64, 128),
        mma.block_n(32, 64, 96, 128),
        mma.warps(4, 8),
        mma.stages(1, 2, 3, 4),
        mma.ACCUMULATE,
    ),
    constraints=(
        mma.ROWS_PER_WARP,
        mma.WIDE_BLOCKS,
        mma.ACCUMULATION,
        mma.registers(mma.row_warp_registers),
        mma.shared_memory(_smem_bytes),
        mma.occupancy(_smem_bytes),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=mma.threads,
)
