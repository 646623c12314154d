"""`hopper.split_q`: FlashAttention on wgmma and TMA, for head dims up to 256 on sm_90a.

Measured so far: nothing. The kernel was run on an emulator and compiled for sm_90a; no GPU has run
it. The defaults and the rules on registers and chunks are those of a prototype of the same scheme.
On an H200, at (2, 16, 8192, D) in bf16, that reached 0.87, 0.97 and 0.99 of FlashAttention-3 at
D = 64, 128 and 256; with a causal mask, by a simpler order of tiles, 0.81, 0.78 and 0.78. So this
never answers unmeasured: only `tune` can choose it, which checks each variant that it times.
"""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels import mma
from autofa.kernels.family import Constraint, Domain, HeadDims, KernelFamily, Param, Params, Value
from autofa.problem import Problem

_STAGES = (2, 3, 4, 6, 9, 12)
_HEADS = (1, 4, 8, 16)
# What a consumer's thread has, by the number of consumers; and what of it is for row statistics,
# descriptors and addresses: with less left for them, variants spilled 8 to 180 bytes as compiled.
_REGISTERS = {2: 240, 3: 160}
_OTHER_REGISTERS = 38
# An m64nNk16 takes N / 2 cycles.
_CHUNK_CYCLES = 256


def _consumers(p: Params) -> int:
    return int(p.block_m) // 64


def _threads(p: Params, problem: Problem) -> int:
    """The consumers' warpgroups and the producer's."""
    return 128 * (_consumers(p) + 1)


def _groups(columns: int) -> int:
    """Groups of 64 columns."""
    return -(-columns // 64)


def _groups_per_chunk(p: Params, problem: Problem) -> int:
    return -(-_groups(problem.head_dim) // int(p.key_chunks))


def _stage_bytes(p: Params, problem: Problem) -> int:
    keys = int(p.block_n) * _groups_per_chunk(p, problem)
    values = int(p.block_n) // int(p.value_chunks) * _groups(int(p.columns_v))
    return 128 * max(keys, values)


def _fixed_bytes(p: Params, problem: Problem) -> int:
    """The queries, and two barriers for each warpgroup of them."""
    return _consumers(p) * (64 * 128 * _groups(problem.head_dim) + 16)


def _smem_bytes(p: Params, problem: Problem) -> int:
    """With two barriers for each stage."""
    return _fixed_bytes(p, problem) + int(p.stages) * (_stage_bytes(p, problem) + 16)


def _stages(p: Params, problem: Problem, limits: Limits) -> int:
    """The deepest ring that fits; 0 if none does."""
    left = limits.smem_per_block - _fixed_bytes(p, problem)
    most = left // (_stage_bytes(p, problem) + 16)
    return max((stages for stages in _STAGES if stages <= most), default=0)


def _registers(p: Params) -> int:
    """Of a consumer's thread: output and scores in f32, weights in 16 bits."""
    block_n = int(p.block_n)
    weights = int(p.weight_sets) * block_n // 4
    return int(p.columns_v) // 2 + block_n // 2 + weights + _OTHER_REGISTERS


def _chunks_are_whole(p: Params, problem: Problem) -> bool:
    groups = _groups(problem.head_dim)
    no_key_chunk_empty = (int(p.key_chunks) - 1) * _groups_per_chunk(p, problem) < groups
    return no_key_chunk_empty and p.block_n % (16 * p.value_chunks) == 0


def _chunks_are_long(p: Params, problem: Problem) -> bool:
    steps = min(4 * _groups_per_chunk(p, problem), -(-problem.head_dim // 16))
    key_cycles = steps * int(p.block_n) // 2
    value_cycles = int(p.block_n) // int(p.value_chunks) // 16 * int(p.columns_v) // 2
    return (p.key_chunks == 1 or key_cycles >= _CHUNK_CYCLES) and (
        p.value_chunks == 1 or value_cycles >= _CHUNK_CYCLES
    )


def _heads_take_turns(p: Params, problem: Problem) -> bool:
    if not problem.causal:
        return bool(p.heads == 1)
    return bool(p.heads <= problem.batch * problem.heads_q)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """The prototype's best: whole tiles as chunks where four of them fit, else halves."""
    wider = max(problem.head_dim, problem.head_dim_v)
    block_m, block_n = next(
        tile
        for last, tile in ((64, (192, 96)), (128, (128, 128)), (192, (128, 96)), (256, (128, 64)))
        if wider <= last
    )
    p = Params(
        block_m=block_m,
        block_n=block_n,
        columns_v=mma.columns(problem.head_dim_v, 32),
        key_chunks=2 if problem.head_dim > 192 else 1,
        value_chunks=2 if problem.head_dim_v > 192 else 1,
        softmax_parts=1,
        weight_sets=1 if block_m == 192 else 2,
        heads=1,
    )
    if problem.causal:
        p.heads = max(h for h in _HEADS if h <= min(8, problem.batch * problem.heads_q))
    p.stages = _stages(p, problem, limits)
    return dict(vars(p))


FAMILY = KernelFamily(
    name="hopper.split_q",
    title="hopper(split-q)",
    version=1,
    folder="hopper_split_q",
    entry="kernel.cuh",
    domain=Domain(
        device="cuda",
        dtypes=("f16", "bf16"),
        head_dims=HeadDims(step=8, first=8, last=256),
        masks=("none", "causal", "causal_lower_right"),
        min_arch=90,
        max_arch=90,
        alignment=16,
    ),
    params=(
        mma.block_m(128, 192),
        mma.block_n(64, 80, 96, 128, 144, 160, 176),
        Param("columns_v", tuple(range(32, 257, 32)), "v{}", about="the value head dim, filled up"),
        Param("key_chunks", (1, 2), "c{}", about="chunks of a tile of keys, along the head dim"),
        Param("value_chunks", (1, 2), "x{}", joined=True, about="chunks of a tile of values"),
        Param("stages", _STAGES, "s{}", about="buffers of the ring, of one chunk each"),
        Param("softmax_parts", (1, 2), "p{}", about="value chunks that the softmax runs beside"),
        Param("weight_sets", (1, 2), "w{}", about="2: the next weights do not wait for the output"),
        Param("heads", _HEADS, "h{}", about="heads whose tiles are taken together"),
    ),
    constraints=(
        Constraint(
            "value columns",
            "the output has the value head dim's columns, filled up to a multiple of 32",
            lambda p, problem, limits: p.columns_v == mma.columns(problem.head_dim_v, 32),
        ),
        Constraint(
            "heads in turn",
            "tiles of several heads are mixed to balance a causal mask, as far as there are heads",
            lambda p, problem, limits: _heads_take_turns(p, problem),
        ),
        Constraint(
            "chunks",
            "chunks are of whole 64-column groups of keys and of whole 16-key squares of values",
            lambda p, problem, limits: _chunks_are_whole(p, problem),
        ),
        Constraint(
            "chunk size",
            "a chunk hides a wait only where it keeps the tensor cores busy for 256 cycles",
            lambda p, problem, limits: _chunks_are_long(p, problem),
        ),
        Constraint(
            "softmax parts",
            "each part of the softmax runs beside a chunk of values of its own",
            lambda p, problem, limits: p.softmax_parts <= p.value_chunks,
        ),
        Constraint(
            "registers",
            "output, scores and weights stay in a consumer's registers: 240, or 160 for three",
            lambda p, problem, limits: _registers(p) <= _REGISTERS[_consumers(p)],
        ),
        mma.shared_memory(_smem_bytes),
        Constraint(
            "idle memory",
            "a block has its SM to itself, and a ring takes as much of the memory left as it can",
            lambda p, problem, limits: p.stages == _stages(p, problem, limits),
        ),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=_threads,
)
