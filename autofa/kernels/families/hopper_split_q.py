"""`hopper.split_q`: FlashAttention on wgmma and TMA, for head dims up to 256 on sm_90a.

Measured on an H200, bf16, (2, 16, 8192, D), as shares of a bf16 matmul of 8192^3 in the same run:
dense 0.62, 0.97 and 1.03 at D = 64, 128 and 256 (cuDNN 0.59, 0.82, 0.90). Causal 0.49, 0.70, 0.98
(cuDNN 0.54, 0.72, 0.81), by tiles in a fixed order. The counter, the softmax that does not wait for
maxima, and tiles of 64 rows came after that: no GPU has run them. Whole tiles as chunks were best;
a second set of weights was worth more than more keys in a tile, where both did not fit. Turns took
dense D = 64 from 414 to 454 TFLOP/s, and D = 128 from 736 to 743 (n128, w2; launches included).

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
    of_head = 2 * problem.seqlen_k * columns * problem.heads_kv // problem.heads_q
    most = min(_L2_BYTES // max(1, of_head), problem.batch * problem.heads_q)
    return max(h for h in hopper.HEADS if h <= max(1, most))


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """Whole tiles as chunks, as many keys as the registers allow, and turns where they gained."""
    wider = max(problem.head_dim, problem.head_dim_v)
    block_n, weight_sets = next(
        tile for last, tile in ((128, (128, 2)), (192, (96, 2)), (256, (80, 1))) if wider <= last
    )
    p = Params(
        block_m=64 if _tiles(problem, 128) <= limits.units // 2 else 128,
        block_n=block_n,
        columns_v=mma.columns(problem.head_dim_v, 32),
        chunks=1,
        weight_sets=weight_sets,
        heads=_heads(problem) if problem.causal else 1,
    )
    p.turns = int(wider <= 128 and p.block_m > 64)
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
        mma.block_n(64, 80, 96, 128, 144, 160, 176),
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
        mma.shared_memory(_smem_bytes),
        hopper.no_idle_memory(_stages),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=_threads,
)
