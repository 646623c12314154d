"""`hopper.split_q`: FlashAttention on wgmma and TMA, for head dims up to 256 on sm_90a.

Measured on an H200, bf16, (2, 16, 8192, D), defaults, TFLOP/s beside FlashAttention-3 in the same
run, which also checked the values: dense 566 (526), 641 (599), 782 (704), 774 (739) and 777 (727)
at D = 64, 96, 128, 192 and 256; causal 566 (505), 635 (604), 751 (683), 786 (769) and 796 (776).
That is 0.72 to 1.08 of a bf16 matmul. Whole tiles as chunks were best; a second set of weights was
worth more than more keys in a tile, where both did not fit. Turns took dense D = 64 from 432 to 513
(m128), and from 507 to 536 (m192, n128); they cost causal D = 128 2%. A softmax that waits for
each tile's maxima had 426, 600 and 576 at D = 64, 128 and causal 128.

It never answers unmeasured: only `tune` can choose it, which checks each variant that it times.
"""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels import hopper, mma
from autofa.kernels.family import Constraint, KernelFamily, Param, Params, Value
from autofa.problem import Problem

_STAGES = (2, 3, 4, 6, 9, 12)
# What a consumer's thread has, by the number of consumers; and what of it is for row statistics,
# descriptors and addresses. Of 40 variants as compiled that leave 32 to 42 for them one spilled
# (8 bytes, in chunks), none was serialized; with 16 or 20, five of five were.
_REGISTERS = {1: 240, 2: 240, 3: 160}
_OTHER_REGISTERS = {1: 42, 2: 32, 3: 32}
# Of the tensor cores, for a chunk: an m64nNk16 takes N / 2.
_CHUNK_CYCLES = 256
# What of the L2 the keys and values of the heads in turn may take.
_L2_BYTES = 40 << 20
# Keys and weight sets of one consumer, and with turns those of two: up to which head dim.
_SMALL_TILES = ((128, (128, 2)), (192, (96, 2)), (256, (80, 1)))
_DENSE_TILES = ((128, (128, 2, 1)), (160, (96, 2, 1)), (192, (112, 2, 1)), (256, (80, 2, 1)))
_CAUSAL_TILES = ((96, (128, 2, 1)), (128, (128, 2, 0)), (192, (96, 2, 1)), (256, (80, 1, 1)))


def _consumers(p: Params) -> int:
    return int(p.block_m) // 64


def _threads(p: Params, problem: Problem) -> int:
    """The consumers' warpgroups and the producer's."""
    return 128 * (_consumers(p) + 1)


def _groups_per_chunk(p: Params, problem: Problem) -> int:
    return -(-hopper.groups(problem.head_dim) // int(p.chunks))


def _stage_bytes(p: Params, problem: Problem) -> int:
    keys = int(p.block_n) * _groups_per_chunk(p, problem)
    values = int(p.block_n) // int(p.chunks) * hopper.groups(int(p.columns_v))
    return hopper.ROW_BYTES * max(keys, values)


def _fixed_bytes(p: Params, problem: Problem) -> int:
    """The queries, and two barriers for each warpgroup of them; the board of tiles."""
    queries = 64 * hopper.ROW_BYTES * hopper.groups(problem.head_dim)
    return _consumers(p) * (queries + 2 * hopper.BARRIER_BYTES) + 6 * hopper.BARRIER_BYTES


def _smem_bytes(p: Params, problem: Problem) -> int:
    stage = _stage_bytes(p, problem) + 2 * hopper.BARRIER_BYTES
    return _fixed_bytes(p, problem) + int(p.stages) * stage


def _stages(p: Params, problem: Problem, limits: Limits) -> int:
    """The deepest ring that fits; 0 if none does."""
    free = limits.smem_per_block - _fixed_bytes(p, problem)
    return hopper.deepest(_STAGES, free, _stage_bytes(p, problem))


def _registers(p: Params) -> int:
    """Of a consumer's thread: output and scores in f32, weights in 16 bits."""
    block_n = int(p.block_n)
    weights = int(p.weight_sets) * block_n // 4
    return int(p.columns_v) // 2 + block_n // 2 + weights + _OTHER_REGISTERS[_consumers(p)]


def _second_set_fits(p: Params) -> bool:
    """Beside which one set never won from head dim 64 to 128 on an H200."""
    return _registers(p) + int(p.block_n) // 4 <= _REGISTERS[_consumers(p)]


def _chunks_are_whole(p: Params, problem: Problem) -> bool:
    groups = hopper.groups(problem.head_dim)
    no_key_chunk_empty = (int(p.chunks) - 1) * _groups_per_chunk(p, problem) < groups
    return no_key_chunk_empty and p.block_n % (16 * p.chunks) == 0


def _chunks_are_long(p: Params, problem: Problem) -> bool:
    steps = min(4 * _groups_per_chunk(p, problem), -(-problem.head_dim // 16))
    key_cycles = steps * int(p.block_n) // 2
    value_cycles = int(p.block_n) // int(p.chunks) // 16 * int(p.columns_v) // 2
    return p.chunks == 1 or min(key_cycles, value_cycles) >= _CHUNK_CYCLES


def _tiles(problem: Problem, rows: int) -> int:
    return problem.batch * problem.heads_q * -(-problem.seqlen_q // rows)


def _heads(problem: Problem) -> int:
    """As many as have their keys and values in L2."""
    columns = problem.head_dim + problem.head_dim_v
    of_head = 2 * problem.seqlen_k * columns * problem.heads_kv // max(1, problem.heads_q)
    most = min(_L2_BYTES // max(1, of_head), problem.batch * problem.heads_q)
    return max(h for h in hopper.HEADS if h <= max(1, most))


def _tile(problem: Problem, limits: Limits) -> tuple[int, int, int, int]:
    """Rows, keys, weight sets and turns. Three consumers are for grids that last a while."""
    wider = max(problem.head_dim, problem.head_dim_v)
    if _tiles(problem, 128) <= limits.units // 2:
        return next((64, *tile, 0) for last, tile in _SMALL_TILES if wider <= last)
    if wider <= 64 and _tiles(problem, 192) >= 2 * limits.units:
        return 192, 96, 2, 1
    tiles = _CAUSAL_TILES if problem.causal else _DENSE_TILES
    return next((128, *tile) for last, tile in tiles if wider <= last)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """What was fastest of whole tiles as chunks on an H200."""
    block_m, block_n, weight_sets, turns = _tile(problem, limits)
    p = Params(
        block_m=block_m,
        block_n=block_n,
        columns_v=mma.columns(problem.head_dim_v, 32),
        chunks=1,
        weight_sets=weight_sets,
        turns=turns,
        heads=_heads(problem) if problem.causal else 1,
    )
    p.stages = _stages(p, problem, limits)
    return dict(vars(p))


FAMILY = KernelFamily(
    name="hopper.split_q",
    title="hopper(split-q)",
    version=1,
    folder="hopper_split_q",
    entry="kernel.cuh",
    domain=hopper.domain(8, 256),
    params=(
        mma.block_m(64, 128, 192),
        mma.block_n(64, 80, 96, 112, 128, 144, 160, 176),
        Param("columns_v", tuple(range(32, 257, 32)), "v{}", about="the value head dim, filled up"),
        Param("chunks", (1, 2), "c{}", about="of a tile: of keys along the head dim"),
        hopper.stages(_STAGES),
        Param("weight_sets", (1, 2), "w{}", about="2: the next weights do not wait for the output"),
        Param("turns", (0, 1), "t{}", about="1: warpgroups issue a tile's products in turn"),
        hopper.heads(),
    ),
    constraints=(
        hopper.value_columns(32),
        hopper.heads_in_turn(),
        Constraint(
            "heads in L2",
            "the heads in turn are about as many as have their keys and values in L2",
            lambda p, problem, limits: (
                not problem.causal or _heads(problem) <= 4 * p.heads <= 16 * _heads(problem)
            ),
        ),
        Constraint(
            "small grid",
            "one consumer is for so few rows that not every SM has two of 64",
            lambda p, problem, limits: p.block_m > 64 or _tiles(problem, 128) < limits.units,
        ),
        Constraint(
            "turns",
            "several consumers take turns, each with whole tiles",
            lambda p, problem, limits: p.turns == 0 or (p.block_m > 64 and p.chunks == 1),
        ),
        Constraint(
            "chunks",
            "chunks are of whole 64-column groups of keys and of whole 16-key squares of values",
            lambda p, problem, limits: _chunks_are_whole(p, problem),
        ),
        Constraint(
            "chunk size",
            "a chunk is to keep the tensor cores busy for 256 cycles, or be a whole tile",
            lambda p, problem, limits: _chunks_are_long(p, problem),
        ),
        Constraint(
            "registers",
            "output, scores and weights stay in a consumer's registers: 240, or 160 for three",
            lambda p, problem, limits: _registers(p) <= _REGISTERS[_consumers(p)],
        ),
        Constraint(
            "weights",
            "up to a head dim of 128 one set of weights is for tiles of which two do not fit",
            lambda p, problem, limits: (
                p.weight_sets == 2
                or max(problem.head_dim, problem.head_dim_v) > 128
                or not _second_set_fits(p)
            ),
        ),
        Constraint(
            "keys",
            "112 keys are for head dims above 160, where 128 leave no second set of weights",
            lambda p, problem, limits: (
                p.block_n != 112 or max(problem.head_dim, problem.head_dim_v) > 160
            ),
        ),
        mma.shared_memory(_smem_bytes),
        hopper.no_idle_memory(_stages),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=_threads,
)
