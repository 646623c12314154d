"""`mma.decode`: few queries against many keys, which are split over thread blocks and warps.

A tile has 32 rows at most. Where more share a key head, as the 128 query heads of a latent cache
do, each tile of rows reads the keys and values again, all but one of them from L2. With 128 heads
on one key head of 576 columns an H200 loads 4,400 GB/s, as fast as with groups of 4, but eight
times over: 550 GB/s of keys and values. Tiles of 64 rows and more would be the remedy.
"""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels import mma
from autofa.kernels.family import Constraint, Domain, HeadDims, KernelFamily, Param, Params, Value
from autofa.problem import EXPLICIT_MASKS, Problem

_MOST_QUERIES = 16
_MOST_ROWS = 64
_COLUMN_WARPS = (1, 2, 4, 8)
_STAGES = (1, 2, 3, 4, 6)
# Of an SM's shared memory that buffers take at least: what is on the way hides the way there.
_LEAST_PART = 4


def _rows(problem: Problem) -> int:
    """Query rows that read one key head. A call may have no heads."""
    return problem.seqlen_q * problem.heads_q // max(problem.heads_kv, 1)


def _few_queries(p: Params, problem: Problem, limits: Limits) -> bool:
    return problem.seqlen_q <= _MOST_QUERIES or _rows(problem) <= _MOST_ROWS


def _warps(p: Params) -> int:
    return int(p.key_warps) * int(p.column_warps)


def _keys(p: Params) -> int:
    """Of a warp's tile."""
    return int(p.block_n) // int(p.key_warps)


def _columns(p: Params, problem: Problem) -> int:
    """Of a warp."""
    return mma.columns(-(-problem.head_dim // int(p.column_warps)))


def _wide(p: Params, problem: Problem) -> bool:
    """Whether 16 keys are enough work for what a warp's tile costs."""
    return int(p.block_m) * _columns(p, problem) >= 16 * 64


def _registers(p: Params, problem: Problem) -> int:
    """Per thread: output, queries and scores, and what the rest took as compiled."""
    tiles = int(p.block_m) // 16
    other = 48 + (24 if problem.mask in EXPLICIT_MASKS else 12) * tiles
    return tiles * (_columns(p, problem) * 3 // 4 + _keys(p) // 2) + other


def _ring_bytes(p: Params, problem: Problem) -> int:
    """Keys and values in 16-bit rows, each with 16 bytes that are not used."""
    row = _columns(p, problem) * 2 + 16
    return _warps(p) * 2 * int(p.stages) * _keys(p) * row


def _smem_bytes(p: Params, problem: Problem) -> int:
    """Buffers, and partial scores of two tiles in f32; or after them the output of all warps."""
    exchange = 2 * _warps(p) * int(p.block_m) * _keys(p) * 4 if p.column_warps > 1 else 0
    merge = 0
    if p.key_warps > 1:
        merge = _warps(p) * int(p.block_m) * _columns(p, problem) * 4
        merge += int(p.key_warps) * int(p.block_m) * 4
    return max(_ring_bytes(p, problem) + exchange, merge)


def _blocks(p: Params, problem: Problem, limits: Limits) -> int:
    """That run on an SM at once, as far as registers and shared memory go."""
    by_registers = limits.regs_per_sm // (32 * _warps(p) * (_registers(p, problem) + 32))
    return min(by_registers, mma.resident_blocks(_smem_bytes(p, problem), limits))


def _column_warps(block_m: int, problem: Problem) -> int:
    """The fewest of which each can hold its part of the output and of the queries (with more, some
    variants spilled as compiled), and none is idle where that can be; 0 if there are none."""
    tiles = block_m // 16
    most = 144 if tiles == 1 else 80 if problem.mask in EXPLICIT_MASKS else 128
    for warps in _COLUMN_WARPS:
        columns = mma.columns(-(-problem.head_dim // warps))
        if tiles * columns <= most and (warps - 1) * columns < problem.head_dim:
            return warps
    return _COLUMN_WARPS[-1] if tiles == 1 else 0


def _rows_are_there(p: Params, problem: Problem) -> bool:
    return bool(p.block_m == 16 or p.block_m < 2 * _rows(problem))


def _enough_on_the_way(p: Params, problem: Problem, limits: Limits) -> bool:
    loaded = _blocks(p, problem, limits) * _ring_bytes(p, problem)
    return loaded * _LEAST_PART >= limits.smem_per_sm


def _depths(block_m: int, keys: int, problem: Problem, limits: Limits) -> list[Params]:
    """Of `keys` per warp: the legal ones, by their stages. Four warps, or eight where four are
    needed for the columns alone."""
    column_warps = _column_warps(block_m, problem)
    if column_warps == 0:
        return []
    key_warps = 4 if column_warps == 1 else 1 if column_warps == 8 else 2
    tried = (
        Params(
            block_m=block_m,
            block_n=keys * key_warps,
            key_warps=key_warps,
            column_warps=column_warps,
            stages=stages,
        )
        for stages in _STAGES
    )
    return [
        p
        for p in tried
        if (keys == 32 or _wide(p, problem))
        and _registers(p, problem) <= 255
        and _smem_bytes(p, problem) <= limits.smem_per_block
        and _enough_on_the_way(p, problem, limits)
    ]


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """As many rows as are there, 32 keys a warp or with two tiles of rows 16, and the fewest stages
    by which a block has an SM to itself: then the parts of the keys are few, whose results are
    added up. On an H200 that was the fastest at head dims 128, 256 (32 rows) and 512."""
    shapes = [(16, 32), (16, 16)]
    if _rows(problem) > 16:
        shapes = [(32, 16), (32, 32), *shapes]
    found = next(filter(None, (_depths(*shape, problem, limits) for shape in shapes)))
    alone = [p for p in found if _blocks(p, problem, limits) == 1]
    return dict(vars((alone or found[-1:])[0]))


FAMILY = KernelFamily(
    name="mma.decode",
    title="mma(decode)",
    version=1,
    folder="decode",
    entry="kernel.cuh",
    domain=Domain(
        device="cuda",
        dtypes=("f16", "bf16"),
        head_dims=HeadDims(step=8, first=8, last=1024),
        min_arch=80,
        alignment=16,
        unequal_head_dims=False,
        extra=(
            Constraint(
                "few queries",
                f"serves up to {_MOST_QUERIES} queries, or {_MOST_ROWS} rows of the query heads "
                "that share a key head; with more, reading keys and values is not the limit",
                _few_queries,
            ),
        ),
    ),
    params=(
        mma.block_m(16, 32),
        mma.block_n(16, 32, 64, 128, 256),
        Param("key_warps", (1, 2, 4, 8), "k{}", about="warps that split the keys of a tile"),
        Param("column_warps", _COLUMN_WARPS, "c{}", about="warps that split the head dim"),
        mma.stages(*_STAGES),
    ),
    constraints=(
        Constraint(
            "rows",
            "half of a tile's rows are there, or it is the smallest",
            lambda p, problem, limits: _rows_are_there(p, problem),
        ),
        Constraint(
            "warps",
            "four or eight warps load enough at a time",
            lambda p, problem, limits: _warps(p) in (4, 8),
        ),
        Constraint(
            "keys per warp",
            "a warp's tile is of 16 or 32 keys: more only make the pipeline coarser, and 16 are "
            "little work for what a tile costs with few rows and columns",
            lambda p, problem, limits: _keys(p) == 32 or (_keys(p) == 16 and _wide(p, problem)),
        ),
        Constraint(
            "column warps",
            "no more warps than needed share the columns, for they exchange scores; none is idle",
            lambda p, problem, limits: p.column_warps == _column_warps(int(p.block_m), problem),
        ),
        mma.registers(_registers),
        mma.shared_memory(_smem_bytes),
        Constraint(
            "on the way",
            "a quarter of an SM's shared memory or more is buffers, which hides the way to memory",
            _enough_on_the_way,
        ),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=lambda p, problem: 32 * _warps(p),
)
