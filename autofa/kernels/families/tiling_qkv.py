"""`mma.tiling_qkv`: attention for large head dims on mma.sync, all in slices of it."""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels import mma, mma_columns
from autofa.kernels.family import Constraint, KernelFamily, Params, Value
from autofa.problem import Problem


def _smem_bytes(p: Params, problem: Problem) -> int:
    """The slots, each for a slice of queries and keys or one of values, and the exchanges."""
    slots: int = p.stages * (p.block_m + p.block_n) * p.slice * 2
    return slots + mma_columns.exchange_bytes(p)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    return {
        "block_m": 64,
        "block_n": 128,
        "warps": 8,
        "column_warps": 4,
        "slice": 64,
        "stages": 2,
        "accumulate": "f32",
    }


FAMILY = KernelFamily(
    name="mma.tiling_qkv",
    title="mma(tiling-qkv)",
    version=1,
    folder="tiling_qkv",
    entry="kernel.cuh",
    domain=mma.domain(last_head_dim=1024),
    params=(
        mma.block_m(32, 64, 128),
        mma.block_n(64, 128, 256),
        mma.warps(4, 8),
        mma_columns.COLUMN_WARPS,
        mma_columns.slice_columns(32, 64, 128),
        mma.stages(1, 2, 3, 4),
        mma.ACCUMULATE,
    ),
    constraints=(
        mma_columns.ROWS_AND_COLUMNS,
        mma.ACCUMULATION,
        Constraint(
            "even slices",
            "the column warps share the output's columns of a slice evenly",
            lambda p, problem, limits: p.slice % (16 * p.column_warps) == 0,
        ),
        mma.registers(mma_columns.registers),
        mma.shared_memory(_smem_bytes),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=mma.threads,
)
