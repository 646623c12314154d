"""What the declarations of the mma.sync families have in common: domain, parameters, rules."""

from __future__ import annotations

from collections.abc import Callable

from autofa.device import Limits
from autofa.kernels.family import Constraint, Domain, HeadDims, Param, Params
from autofa.problem import EXPLICIT_MASKS, MASKS, Problem

# Each block takes 1 KiB of the SM's shared memory besides its own.
RESERVED_SMEM = 1024
# Up to here of a thread's 255, estimated as row_warp_registers() does, no default spills.
COMFORTABLE_REGISTERS = 240


def domain(last_head_dim: int) -> Domain:
    """16-bit attention with any mask; head dims are filled up to whole tiles by the loads."""
    return Domain(
        device="cuda",
        dtypes=("f16", "bf16"),
        head_dims=HeadDims(step=8, first=8, last=last_head_dim),
        masks=MASKS,
        min_arch=80,
        alignment=16,
        unequal_head_dims=False,
    )


def block_m(*values: int) -> Param:
    return Param("block_m", values, "m{}", about="query rows of a thread block")


def block_n(*values: int) -> Param:
    return Param("block_n", values, "n{}", joined=True, about="keys of a tile")


def warps(*values: int) -> Param:
    return Param("warps", values, "w{}", about="warps of a thread block")


def stages(*values: int) -> Param:
    return Param("stages", values, "s{}", about="buffers of the pipeline")


ACCUMULATE = Param("accumulate", ("f32", "f16"), "{}", about="type of the sums in a product")


def columns(head_dim: int, step: int = 16) -> int:
    """The columns of a tile: the head dim rounded up."""
    return -(-head_dim // step) * step


def threads(p: Params, problem: Problem) -> int:
    """Of a thread block."""
    warps: int = p.warps
    return 32 * warps


def row_warp_registers(p: Params, problem: Problem) -> int:
    """Per thread, where each warp keeps all scores and the whole output of its own rows, in f32.

    The rest is what row statistics, operands, addresses and applying an explicit mask took as
    compiled.
    """
    tiles: int = p.block_m // p.warps // 16
    explicit = problem.mask in EXPLICIT_MASKS
    sums = tiles * (columns(problem.head_dim) + int(p.block_n)) // 2
    return sums + 32 + 12 * tiles + (11 * tiles if explicit else 0)


def rows_fit(p: Params, problem: Problem) -> bool:
    """Whether a default may take so many rows: explicit masks for two tiles of them soon spill."""
    most = 200 if problem.mask in EXPLICIT_MASKS else 255
    return row_warp_registers(p, problem) <= most


def few_rows(p: Params, problem: Problem, limits: Limits) -> bool:
    """Whether blocks of so many rows would leave rows of tiles, or SMs, without work."""
    blocks = problem.batch * problem.heads_q * -(-problem.seqlen_q // p.block_m)
    return bool(problem.seqlen_q <= p.block_m // 2 or blocks <= 2 * limits.units)


ROWS_PER_WARP = Constraint(
    "rows per warp",
    "each warp owns whole 16-row tiles",
    lambda p, problem, limits: p.block_m % (16 * p.warps) == 0,
)
ACCUMULATION = Constraint(
    "accumulation",
    "tensor cores sum up in f16 for f16 inputs only",
    lambda p, problem, limits: p.accumulate == "f32" or problem.dtype == "f16",
)


def registers(of: Callable[[Params, Problem], int]) -> Constraint:
    """At most what a thread has; `of(params, problem)` is what it needs."""
    return Constraint(
        "registers",
        "output and scores of a warp's rows stay in its registers, of which a thread has 255",
        lambda p, problem, limits: of(p, problem) <= 255,
    )


def shared_memory(of: Callable[[Params, Problem], int]) -> Constraint:
    """At most what a block may have; `of(params, problem)` is what it needs, in bytes."""
    return Constraint(
        "shared memory",
        "the tiles of all stages fit in one block",
        lambda p, problem, limits: of(p, problem) <= limits.smem_per_block,
    )


def resident_blocks(smem_bytes: int, limits: Limits) -> int:
    """How many blocks an SM's shared memory holds."""
    return limits.smem_per_sm // (smem_bytes + RESERVED_SMEM)


def occupancy(of: Callable[[Params, Problem], int]) -> Constraint:
    """Prunes deep pipelines that leave an SM with few warps; `of` is the block's shared memory."""
    return Constraint(
        "occupancy",
        "more than one stage pays only where an SM still holds eight warps",
        lambda p, problem, limits: (
            p.stages == 1 or resident_blocks(of(p, problem), limits) * p.warps >= 8
        ),
    )


# Warps of 32 rows read keys and values half as often from shared memory.
WIDE_BLOCKS = Constraint(
    "wide blocks",
    "eight warps of 16 rows are for head dims of which four warps cannot hold 32 rows",
    lambda p, problem, limits: p.warps == 4 or columns(problem.head_dim) > 128,
)
