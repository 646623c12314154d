"""What the declarations of the mma.sync families with column warps have in common.

Warps stand in rows and columns: those of a row share its queries, score a part of the keys each,
exchange the softmax weights, and accumulate a part of the output's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autofa.device import Limits
from autofa.kernels import mma
from autofa.kernels.family import Constraint, Param, Params
from autofa.problem import EXPLICIT_MASKS, Problem

COLUMN_WARPS = Param("column_warps", (1, 2, 4, 8), "c{}", joined=True, about="warps of a row")
_SLICES = (32, 64, 128)
SLICE = Param("slice", _SLICES, "k{}", about="head dim columns of a piece of q and k")

# Keys and output columns of a warp of 32 rows: more than that many f32 sums per row do not fit its
# registers.
_MOST_SUMS = 192
# Those of defaults, which do not spill, but for 12 bytes on sm_80 above head dim 512 with a causal
# mask: half the keys would cost a fifth of the speed. Explicit masks need registers too: the first
# figure that a tile can have is taken.
_EASY_SUMS = (160,)
_EASY_SUMS_EXPLICIT = (120, 144, 160)


def exchange_bytes(p: Params) -> int:
    """Shared memory for a tile's weights in 16 bits, and for a float per row and column warp."""
    if p.column_warps == 1:
        return 0
    weights: int = p.block_m * p.block_n * 2
    rows: int = p.column_warps * p.block_m * 4
    return weights + rows


def slice_bytes(p: Params) -> int:
    """A slice of a tile's queries and keys."""
    return int((p.block_m + p.block_n) * p.slice * 2)


def _sums(p: Params, problem: Problem) -> int:
    """Keys and output columns of one warp."""
    warps = int(p.column_warps)
    return mma.columns(problem.head_dim, 16 * warps) // warps + int(p.block_n) // warps


def _column_warps(problem: Problem) -> list[int]:
    fewest = _fewest_column_warps(problem)
    more = 2 * fewest
    enough = more <= 8 and mma.columns(problem.head_dim, 16 * more) // more >= 48
    return [fewest, more] if enough else [fewest]


def _widest_slice(problem: Problem) -> int:
    """The widest that fills the head dim up with few zeros more than the narrowest does.

    Beyond 512, eight column warps need slices of 128 to share them.
    """
    least = mma.columns(problem.head_dim, _SLICES[0])
    allowed = 1.25 if problem.head_dim > 512 else 1.125
    if mma.columns(problem.head_dim, 128) <= allowed * least:
        return 128
    return 64 if mma.columns(problem.head_dim, 64) <= 1.25 * least else 32


def _least_keys(column_warps: int) -> int:
    """Of a tile: with fewer, column warps read queries too often."""
    return 64 if column_warps == 1 else 128


def _fewest_column_warps(problem: Problem) -> int:
    """With which the output and a tile of keys fit the registers."""
    for warps in (1, 2, 4):
        p = Params(column_warps=warps, block_n=_least_keys(warps))
        if _sums(p, problem) <= _MOST_SUMS:
            return warps
    return 8


SPACE = (
    Constraint(
        "rows per warp",
        "warps of 32 rows read keys and values half as often as those of 16",
        lambda p, problem, limits: p.block_m * p.column_warps == 32 * p.warps,
    ),
    Constraint(
        "keys per tile",
        "column warps that score few keys each read queries too often",
        lambda p, problem, limits: p.block_n >= _least_keys(p.column_warps),
    ),
    Constraint(
        "wide blocks",
        "with four column warps, eight warps read keys for twice the rows of four",
        lambda p, problem, limits: p.warps == 8 or p.column_warps <= 2,
    ),
    Constraint(
        "registers",
        "scores and output of a warp's rows stay in its registers",
        lambda p, problem, limits: _sums(p, problem) <= _MOST_SUMS,
    ),
    Constraint(
        "column warps",
        "the fewest that hold the output, or twice as many if that leaves each 48 columns",
        lambda p, problem, limits: p.column_warps in _column_warps(problem),
    ),
    Constraint(
        "slice",
        "the widest that fills head dims up with few zeros, or half of it where memory is short",
        lambda p, problem, limits: p.slice <= _widest_slice(problem) <= 2 * p.slice,
    ),
    mma.ACCUMULATION,
)


def default_shapes(problem: Problem) -> Iterator[Params]:
    """Tiles and warps from the most desirable on: without spilling, then the fewest column warps,
    then many keys."""
    explicit = problem.mask in EXPLICIT_MASKS
    for most_sums in _EASY_SUMS_EXPLICIT if explicit else _EASY_SUMS:
        yield from _shapes(problem, most_sums)


def _shapes(problem: Problem, most_sums: int) -> Iterator[Params]:
    for column_warps in _column_warps(problem):
        warps = 4 if column_warps == 1 else 8
        for block_n in (256, 128, 64):
            p = Params(
                block_m=32 * warps // column_warps,
                block_n=block_n,
                warps=warps,
                column_warps=column_warps,
                accumulate="f32",
            )
            if block_n >= _least_keys(column_warps) and _sums(p, problem) <= most_sums:
                yield p


def default_pieces(p: Params, problem: Problem) -> Iterator[Params]:
    """The same with slices and stages, from the most desirable on."""
    widest = _widest_slice(problem)
    for width, stages in ((widest, 2), (widest // 2, 3), (widest // 2, 2)):
        if width in _SLICES:
            yield Params(**vars(p), slice=width, stages=stages)


def first_that_fits(
    found: Iterator[Params], of: Callable[[Params, Problem], int], problem: Problem, limits: Limits
) -> Params:
    """The first whose shared memory, `of(params, problem)`, a block may have."""
    return next(p for p in found if of(p, problem) <= limits.smem_per_block)
