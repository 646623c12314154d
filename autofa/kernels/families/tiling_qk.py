"""`mma.tiling_qk`: attention for large head dims on mma.sync, queries and keys in slices of it."""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels import mma, mma_columns
from autofa.kernels.family import Constraint, KernelFamily, Param, Params, Value
from autofa.problem import Problem

_V_KEYS = (16, 32, 64, 128)


def _key_bytes(p: Params, problem: Problem) -> int:
    """One key's values."""
    return mma.columns(problem.head_dim, 16 * p.column_warps) * 2


def _largest_chunk(p: Params, problem: Problem) -> int:
    """The most keys whose values take up to 4/3 of the memory of a slice of queries and keys."""
    fitting = (
        keys
        for keys in _V_KEYS
        if keys <= p.block_n and 3 * keys * _key_bytes(p, problem) <= 4 * mma_columns.slice_bytes(p)
    )
    return max(fitting, default=_V_KEYS[0])


def _smem_bytes(p: Params, problem: Problem) -> int:
    """The slots, each for a slice of queries and keys or a chunk of values, and the exchanges."""
    slot = max(mma_columns.slice_bytes(p), int(p.v_keys) * _key_bytes(p, problem))
    return int(p.stages) * slot + mma_columns.exchange_bytes(p)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """The widest pieces: each costs a barrier, and an H200 loses a tenth by halving them."""
    found = (
        Params(**vars(p), v_keys=_largest_chunk(p, problem))
        for shape in mma_columns.default_shapes(problem)
        for p in mma_columns.default_pieces(shape, problem)
    )
    return dict(vars(mma_columns.first_that_fits(found, _smem_bytes, problem, limits)))


FAMILY = KernelFamily(
    name="mma.tiling_qk",
    title="mma(tiling-qk)",
    version=1,
    folder="tiling_qk",
    entry="kernel.cuh",
    domain=mma.domain(last_head_dim=1024),
    params=(
        mma.block_m(32, 64, 128),
        mma.block_n(64, 128, 256),
        mma.warps(4, 8),
        mma_columns.COLUMN_WARPS,
        mma_columns.SLICE,
        Param("v_keys", _V_KEYS, "v{}", joined=True, about="keys of a piece of values"),
        mma.stages(1, 2, 3, 4),
        mma.ACCUMULATE,
    ),
    constraints=(
        *mma_columns.SPACE,
        Constraint(
            "value pieces",
            "the largest that share the slots of slices of queries and keys",
            lambda p, problem, limits: p.v_keys == _largest_chunk(p, problem),
        ),
        mma.shared_memory(_smem_bytes),
        mma.occupancy(_smem_bytes),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=mma.threads,
)
