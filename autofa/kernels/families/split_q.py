"""`mma.split_q`: FlashAttention-2 on mma.sync, only the query rows split over the warps."""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels import mma
from autofa.kernels.family import KernelFamily, Params, Value
from autofa.problem import Problem


def _smem_bytes(p: Params, problem: Problem) -> int:
    """The query tile, and a key and a value tile per stage, of 2-byte elements."""
    rows: int = p.block_m + 2 * p.stages * p.block_n
    return rows * mma.columns(problem.head_dim) * 2


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """What was best of an H200 overall, and half the rows where SMs would be left without a block.

    At head dim 128, 64 keys just fit the registers, with two stages; without room for those, 32.
    """
    p = Params(block_m=128, block_n=64, warps=4, stages=2, accumulate="f32")
    if mma.few_rows(p, problem, limits) or not mma.rows_fit(p, problem):
        p.block_m = 64
    deep = mma.resident_blocks(_smem_bytes(p, problem), limits) >= 2
    if not deep and mma.row_warp_registers(p, problem) > mma.COMFORTABLE_REGISTERS:
        p.block_n = 32
        deep = mma.resident_blocks(_smem_bytes(p, problem), limits) >= 2
    if not deep:
        p.stages = 1
    if _smem_bytes(p, problem) > limits.smem_per_block:
        p.block_n = 32
    return dict(vars(p))


FAMILY = KernelFamily(
    name="mma.split_q",
    title="mma(split-q)",
    version=2,
    folder="split_q",
    entry="kernel.cuh",
    domain=mma.domain(last_head_dim=256),
    params=(
        mma.block_m(64, 128),
        mma.block_n(32, 64, 96, 128),
        mma.warps(4, 8),
        mma.stages(1, 2, 3),
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
