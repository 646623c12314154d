"""`hopper.cluster_split_d`: FlashAttention on wgmma and TMA for head dims of 257 to 640 on sm_90a.

On an H200, bf16 and 1,8,8192, TFLOPS and their share of a matmul's in the same rounds:

| head dim | step | chunks | dense | causal |
|---|---|---|---|---|
| 288 | 128 keys | 3 groups, 64 keys | 566, 0.74 | |
| 320 | 128 keys | 3 groups, 64 keys | 646, 0.83 | 592, 0.76 |
| 384 | 128 keys | 3 groups, 64 keys | 652, 0.85 | 602, 0.80 |
| 448 | 128 keys | 2 groups, 32 keys | 602, 0.78 | |
| 512 | 128 keys | 2 groups, 32 keys | 687, 0.88 | 619, 0.80 |
| 576 | 64 keys | 5 groups, 32 keys | 498, 0.64 | |
| 640 | 64 keys | 2 groups, 16 keys | 525, 0.67 | 492, 0.63 |

With 48 heads 512 reached 659, 0.90, and 547, 0.70, with 32 heads of 1024 keys. The softmax beside
several chunks (`p1`) or the last (`p0`) made 3% at most either way. Chunks of 4 groups were slower
everywhere, as were those of 2 groups and 32 keys where longer ones fit. Under a causal mask tiles
of 8 heads in turn were the best, of fewer the worse. One buffer for the other block's weights
instead of two was slower but at 512 dense.

Above 512 a block's output takes two products, and registers and shared memory leave room for steps
of 64 keys only, or 96 up to 576. Those of 96, in short chunks, had 394 at 576 dense and 354 causal;
at 448 they had 583 where 128 had 602. Two long chunks at 640 had 338: what is loaded has too little
ahead of it.

The family never answers unmeasured: only `tune` can choose it, which checks each variant that it
times.
"""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels import hopper, mma
from autofa.kernels.family import Constraint, KernelFamily, Param, Params, Value
from autofa.problem import Problem

_STAGES = (2, 3, 4, 5, 6, 7, 8)
_THREADS = 128 * 3  # two warpgroups that compute, and the producer's
_REGISTERS = 240  # of a thread that computes
_OTHER_REGISTERS = 40  # row statistics, descriptors and addresses, as compiled without spills
_NARROW = 512  # columns up to which a block's output is one product's, and a ring has room
# Of the tensor cores, for a chunk: an m64nNk16 takes N / 2. Values of 320 columns come in chunks of
# 160 cycles where longer ones leave no room for three buffers.
_KEY_CYCLES, _VALUE_CYCLES = 256, 160


def _columns(p: Params) -> int:
    """Of the output, in one block of the cluster."""
    return int(p.columns_v) // 2


def _keys(p: Params) -> int:
    """Of a step, of which one block has the scores."""
    return int(p.block_n) // 2


def _chunk_bytes(p: Params) -> tuple[int, int]:
    """Of keys and of values."""
    keys = _keys(p) * int(p.key_groups)
    values = int(p.value_keys) * hopper.groups(_columns(p))
    return hopper.ROW_BYTES * keys, hopper.ROW_BYTES * values


def _stage_bytes(p: Params) -> int:
    return max(_chunk_bytes(p))


def _fixed_bytes(p: Params, problem: Problem) -> int:
    """For each warpgroup its queries, two buffers for the other block's weights, row maxima and row
    sums, and six barriers."""
    queries = 64 * hopper.ROW_BYTES * hopper.groups(problem.head_dim)
    exchange = 2 * (64 * _keys(p) * 2 + 2 * 64 * 4)
    return 2 * (queries + exchange + 6 * hopper.BARRIER_BYTES)


def _smem_bytes(p: Params, problem: Problem) -> int:
    return _fixed_bytes(p, problem) + int(p.stages) * (_stage_bytes(p) + 2 * hopper.BARRIER_BYTES)


def _stages(p: Params, problem: Problem, limits: Limits) -> int:
    """The deepest ring that fits; 0 if none does."""
    free = limits.smem_per_block - _fixed_bytes(p, problem)
    return hopper.deepest(_STAGES, free, _stage_bytes(p))


def _registers(p: Params) -> int:
    """Of a thread: its output, scores in f32 and the weights of both blocks in 16 bits."""
    return _columns(p) // 2 + _keys(p) // 2 + 2 * _keys(p) // 4 + _OTHER_REGISTERS


def _widest(problem: Problem) -> int:
    return max(problem.head_dim, problem.head_dim_v)


def _step_suits(p: Params, problem: Problem) -> bool:
    keys = int(p.block_n)
    if _widest(problem) > _NARROW:
        return keys < 128
    return keys == 128 or (keys == 96 and _widest(problem) > 384)


def _chunks_are_long(p: Params) -> bool:
    key_cycles = 4 * int(p.key_groups) * _keys(p) // 2
    value_cycles = int(p.value_keys) // 16 * _columns(p) // 2
    return key_cycles >= _KEY_CYCLES and value_cycles >= _VALUE_CYCLES


def _chunks_suit(p: Params, problem: Problem) -> bool:
    keys, values = _chunk_bytes(p)
    alike = abs(keys - values) < hopper.ROW_BYTES * _keys(p)
    if _widest(problem) > _NARROW:
        return alike
    short = p.key_groups < 4 if p.block_n == 128 else alike
    return bool(short and p.stages > 2 and _chunks_are_long(p))


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """Chunks of 24 KB, or 16 where few of those fit; above 512 the largest of which three do."""
    columns_v = mma.columns(problem.head_dim_v, 64)
    wide = columns_v > 384
    p = Params(
        block_m=128,
        block_n=128,
        columns_v=columns_v,
        key_groups=2 if wide else 3,
        value_keys=32 if wide else 64,
        stages=0,
        spread=1,
        heads=hopper.default_heads(problem),
    )
    if _widest(problem) > _NARROW:
        p.block_n, p.key_groups, p.value_keys, p.spread = 64, 5, 32, 0
        if columns_v <= _NARROW or _stages(p, problem, limits) < 3:
            p.key_groups, p.value_keys, p.spread = 2, 16, 1
    elif _stages(p, problem, limits) < 3:
        p.key_groups, p.value_keys = 2, 32
    p.stages = _stages(p, problem, limits)
    return dict(vars(p))


FAMILY = KernelFamily(
    name="hopper.cluster_split_d",
    title="hopper(cluster-split-d)",
    version=1,
    folder="hopper_cluster_split_d",
    entry="kernel.cuh",
    domain=hopper.domain(264, 640),
    params=(
        mma.block_m(128),
        mma.block_n(64, 96, 128),
        Param("columns_v", tuple(range(320, 641, 64)), "v{}", about="value head dim, filled up"),
        Param("key_groups", (2, 3, 4, 5), "c{}", about="64-column groups in a chunk of keys"),
        Param(
            "value_keys", (16, 32, 48, 64), "x{}", joined=True, about="keys in a chunk of values"
        ),
        hopper.stages(_STAGES),
        Param(
            "spread", (0, 1), "p{}", about="1: softmax beside several chunks, 0: beside the last"
        ),
        hopper.heads(),
    ),
    constraints=(
        hopper.value_columns(64),
        hopper.heads_in_turn(),
        Constraint(
            "keys of a step",
            "128 up to 512 columns, or 96 above 384; 64 or 96 where more leave no room for 128",
            lambda p, problem, limits: _step_suits(p, problem),
        ),
        Constraint(
            "whole chunks",
            "a block's keys of a step come in chunks of values as long as each other",
            lambda p, problem, limits: _keys(p) % p.value_keys == 0,
        ),
        Constraint(
            "chunk size",
            "a chunk is to keep the tensor cores busy: 256 cycles of keys, 160 of values; where "
            "buffers are too small for that, keys and values are to fill them alike",
            lambda p, problem, limits: _chunks_suit(p, problem),
        ),
        Constraint(
            "registers",
            "output, scores and weights stay in the 240 registers of a thread",
            lambda p, problem, limits: _registers(p) <= _REGISTERS,
        ),
        mma.shared_memory(_smem_bytes),
        hopper.no_idle_memory(_stages),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=lambda p, problem: _THREADS,
)
