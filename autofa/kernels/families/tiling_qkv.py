"""`mma.tiling_qkv`: attention for large head dims on mma.sync, all operands in slices of it."""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels import mma, mma_columns
from autofa.kernels.family import Constraint, KernelFamily, Params, Value
from autofa.problem import Problem


def _even(p: Params) -> bool:
    return int(p.slice) % (16 * int(p.column_warps)) == 0


def _smem_bytes(p: Params, problem: Problem) -> int:
    """The slots, each for a slice of queries and keys or one of values, and the exchanges."""
    return int(p.stages) * mma_columns.slice_bytes(p) + mma_columns.exchange_bytes(p)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """The widest slices: each costs a barrier, and an H200 loses a tenth by halving them."""
    found = (
        p
        for shape in mma_columns.default_shapes(problem)
        for p in mma_columns.default_pieces(shape, problem)
        if _even(p)
    )
    return dict(vars(mma_columns.first_that_fits(found, _smem_bytes, problem, limits)))


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
        mma_columns.SLICE,
        mma.stages(1, 2, 3, 4),
        mma.ACCUMULATE,
    ),
    constraints=(
        *mma_columns.SPACE,
        Constraint(
            "even slices",
            "the column warps share the output's columns of a slice evenly",
            lambda p, problem, limits: _even(p),
        ),
        mma.shared_memory(_smem_bytes),
        mma.occupancy(_smem_bytes),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=mma.threads,
)
