"""`mma.split_kv`: query rows and keys split over the warps of a block, for few query rows."""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels import mma
from autofa.kernels.family import Constraint, KernelFamily, Param, Params, Value
from autofa.problem import Problem


def _rows_per_warp(p: Params) -> int:
    rows: int = p.block_m * p.key_warps // p.warps
    return rows


def _keys_per_warp(p: Params) -> int:
    keys: int = p.block_n // p.key_warps
    return keys


def _registers(p: Params, problem: Problem) -> int:
    """Per thread: those of row warps with a warp's keys; 8 more per row tile, as compiled."""
    part = Params(block_m=p.block_m, block_n=_keys_per_warp(p), warps=p.warps // p.key_warps)
    return mma.row_warp_registers(part, problem) + _rows_per_warp(p) // 2


def _tile_bytes(p: Params, problem: Problem) -> int:
    """The query tile, and a key and a value tile per stage, of 2-byte elements."""
    rows: int = p.block_m + 2 * p.stages * p.block_n
    return rows * mma.columns(problem.head_dim) * 2


def _smem_bytes(p: Params, problem: Problem) -> int:
    """The tiles or, after them, what is merged at a time, in f32: a value per row and key warp, and
    8 columns from each key warp to each other one that has 16 columns to add up."""
    owners = min(p.key_warps, mma.columns(problem.head_dim) // 16)
    merge: int = p.block_m * 4 * (p.key_warps + 8 * owners * (p.key_warps - 1))
    return max(_tile_bytes(p, problem), merge)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """No more rows than there are, with four warps to share them; two stages where they fit."""
    columns = mma.columns(problem.head_dim)
    p = Params(block_m=64, block_n=64, warps=4, key_warps=2, stages=2, accumulate="f32")
    if problem.seqlen_q <= 16:
        p.block_m, p.block_n, p.key_warps = 16, 128, 4
    elif problem.seqlen_q <= 32 or columns > 128:
        p.block_m, p.block_n, p.key_warps = 32, 128, 4
    if columns > 128:
        p.block_n, p.key_warps = (64, 4) if p.block_m == 16 else (64, 2)
    if _smem_bytes(p, problem) > limits.smem_per_block:
        p.stages = 1
    return dict(vars(p))


FAMILY = KernelFamily(
    name="mma.split_kv",
    title="mma(split-kv)",
    version=1,
    folder="split_kv",
    entry="kernel.cuh",
    domain=mma.domain(last_head_dim=256),
    params=(
        mma.block_m(16, 32, 64, 128),
        mma.block_n(32, 64, 128, 256),
        mma.warps(4, 8),
        Param("key_warps", (2, 4), "k{}", about="warps that share query rows and split the keys"),
        mma.stages(1, 2, 3),
        mma.ACCUMULATE,
    ),
    constraints=(
        Constraint(
            "rows per warp",
            "warps of 32 rows read keys and values half as often; 16 rows are for head dims above "
            "128, of which a warp cannot hold 32, and for blocks that have no more",
            lambda p, problem, limits: (
                _rows_per_warp(p)
                == (min(p.block_m, 32) if mma.columns(problem.head_dim) <= 128 else 16)
            ),
        ),
        Constraint(
            "keys per warp",
            "fewer than 32 keys are for head dims of which shared memory holds few; scores of more "
            "than 64 take too many registers",
            lambda p, problem, limits: (
                (16 if mma.columns(problem.head_dim) > 128 else 32) <= _keys_per_warp(p) <= 64
            ),
        ),
        Constraint(
            "deep pipelines",
            "a third stage is for blocks of so few rows that they wait for keys most of the time",
            lambda p, problem, limits: p.stages <= 2 or p.block_m <= 32,
        ),
        mma.ACCUMULATION,
        mma.registers(_registers),
        mma.shared_memory(_smem_bytes),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=mma.threads,
)
