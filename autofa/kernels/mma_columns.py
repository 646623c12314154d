"""What the declarations of the mma.sync families with column warps have in common.

Warps stand in rows and columns: those of a row share its queries, score a part of the keys each,
exchange the softmax weights, and accumulate a part of the output's columns.
"""

from __future__ import annotations

from autofa.kernels import mma
from autofa.kernels.family import Constraint, Param, Params
from autofa.problem import Problem

COLUMN_WARPS = Param("column_warps", (1, 2, 4, 8), "c{}", joined=True, about="warps of a row")


def slice_columns(*values: int) -> Param:
    return Param("slice", values, "k{}", about="head dim columns of a piece of q and k")


def exchange_bytes(p: Params) -> int:
    """Shared memory for a tile's weights in 16 bits, and for a float per row and column warp."""
    if p.column_warps == 1:
        return 0
    weights: int = p.block_m * p.block_n * 2
    rows: int = p.column_warps * p.block_m * 4
    return weights + rows


def value_columns(p: Params, problem: Problem) -> int:
    """The output's columns, of which all column warps have equally many."""
    return mma.columns(problem.head_dim, 16 * p.column_warps)


def registers(p: Params, problem: Problem) -> int:
    """Per thread: the scores and the output of a warp's part, in f32, and its weights in 16 bits
    where they stay there.

    The rest is what statistics, operands, addresses and applying an explicit mask took as compiled.
    """
    tiles: int = p.block_m // (p.warps // p.column_warps) // 16
    keys: int = p.block_n // p.column_warps
    sums: int = tiles * (value_columns(p, problem) // p.column_warps + keys) // 2
    weights = tiles * keys // 4 if p.column_warps == 1 else 0
    return sums + weights + 64


ROWS_AND_COLUMNS = Constraint(
    "rows and columns",
    "each warp owns whole 16-row tiles and scores whole 16-key tiles",
    lambda p, problem, limits: (
        p.warps % p.column_warps == 0
        and p.block_m % (16 * (p.warps // p.column_warps)) == 0
        and p.block_n % (16 * p.column_warps) == 0
    ),
)
