"""`hopper.cluster_split_d`: FlashAttention on wgmma and TMA for head dims of 257 to 512 on sm_90a.

Measured so far: nothing. The kernel was run on an emulator and compiled for sm_90a; no GPU has run
it. The rules on registers and chunks are those of a prototype of the same scheme. On an H200, at
(1, 8, 8192, D) in bf16, that reached 0.79, 0.81 and 0.84 of a bf16 matmul at D = 320, 384 and 512,
and with a causal mask, by a simpler order of tiles, 0.88 of itself without. Chunks of 16 KB beat
those of 8 and of 32 by a quarter and more. So this never answers unmeasured: only `tune` can choose
it, which checks each variant that it times.
"""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels import mma
from autofa.kernels.family import Constraint, Domain, HeadDims, KernelFamily, Param, Params, Value
from autofa.problem import Problem

_STAGES = (3, 4, 5, 6, 7)
_HEADS = (1, 4, 8, 16)
_THREADS = 128 * 3  # two warpgroups that compute, and the producer's
_REGISTERS = 240  # of a thread that computes
# Of them, scores of 64 keys in f32, and weights of both blocks in 16 bits; and row statistics,
# descriptors and addresses, as compiled without spills.
_STEP_REGISTERS = 32 + 2 * 16
_OTHER_REGISTERS = 40
# Of the tensor cores, for a chunk: an m64nNk16 takes N / 2. Values of 320 columns come in chunks of
# 160 cycles where longer ones leave no room for three buffers.
_KEY_CYCLES, _VALUE_CYCLES = 256, 160


def _groups(columns: int) -> int:
    """Groups of 64 columns."""
    return -(-columns // 64)


def _columns(p: Params) -> int:
    """Of the output, in one block of the cluster."""
    return int(p.columns_v) // 2


def _stage_bytes(p: Params) -> int:
    return 128 * max(64 * int(p.key_groups), int(p.value_keys) * _groups(_columns(p)))


def _fixed_bytes(problem: Problem) -> int:
    """For each warpgroup its queries, two buffers for the other block's weights, row maxima and row
    sums, and six barriers."""
    return 2 * (64 * 128 * _groups(problem.head_dim) + 2 * (64 * 64 * 2 + 2 * 64 * 4) + 6 * 8)


def _smem_bytes(p: Params, problem: Problem) -> int:
    """With two barriers for each stage."""
    return _fixed_bytes(problem) + int(p.stages) * (_stage_bytes(p) + 16)


def _stages(p: Params, problem: Problem, limits: Limits) -> int:
    """The deepest ring that fits; 0 if none does."""
    most = (limits.smem_per_block - _fixed_bytes(problem)) // (_stage_bytes(p) + 16)
    return max((stages for stages in _STAGES if stages <= most), default=0)


def _chunks_are_long(p: Params, problem: Problem) -> bool:
    key_cycles = 4 * int(p.key_groups) * 64 // 2
    value_cycles = int(p.value_keys) // 16 * _columns(p) // 2
    return key_cycles >= _KEY_CYCLES and value_cycles >= _VALUE_CYCLES


def _heads_take_turns(p: Params, problem: Problem) -> bool:
    if not problem.causal:
        return bool(p.heads == 1)
    return bool(p.heads <= problem.batch * problem.heads_q)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """The prototype's best: 16 KB, or 24 where half of the values' columns is no multiple of 64."""
    columns_v = mma.columns(problem.head_dim_v, 64)
    wide = columns_v >= 384
    p = Params(
        block_m=128,
        block_n=128,
        columns_v=columns_v,
        key_groups=2 if wide else 3,
        value_keys=32 if wide else 64,
        stages=0,
        spread=int(wide),
        heads=1,
    )
    if problem.causal:
        p.heads = max(h for h in _HEADS if h <= min(8, problem.batch * problem.heads_q))
    if _stages(p, problem, limits) == 0:
        p.key_groups, p.value_keys = 2, 32
    p.stages = _stages(p, problem, limits)
    return dict(vars(p))


FAMILY = KernelFamily(
    name="hopper.cluster_split_d",
    title="hopper(cluster-split-d)",
    version=1,
    folder="hopper_cluster_split_d",
    entry="kernel.cuh",
    domain=Domain(
        device="cuda",
        dtypes=("f16", "bf16"),
        head_dims=HeadDims(step=8, first=264, last=512),
        masks=("none", "causal", "causal_lower_right"),
        min_arch=90,
        max_arch=90,
        alignment=16,
    ),
    params=(
        mma.block_m(128),
        mma.block_n(128),
        Param("columns_v", tuple(range(320, 513, 64)), "v{}", about="value head dim, filled up"),
        Param("key_groups", (2, 3, 4), "c{}", about="64-column groups in a chunk of keys"),
        Param("value_keys", (32, 64), "x{}", joined=True, about="keys in a chunk of values"),
        Param("stages", _STAGES, "s{}", about="buffers of the ring, of one chunk each"),
        Param(
            "spread", (0, 1), "p{}", about="1: softmax beside several chunks, 0: beside the last"
        ),
        Param("heads", _HEADS, "h{}", about="heads whose tiles are taken together"),
    ),
    constraints=(
        Constraint(
            "value columns",
            "the output has the value head dim's columns, filled up to a multiple of 64",
            lambda p, problem, limits: p.columns_v == mma.columns(problem.head_dim_v, 64),
        ),
        Constraint(
            "heads in turn",
            "tiles of several heads are mixed to balance a causal mask, as far as there are heads",
            lambda p, problem, limits: _heads_take_turns(p, problem),
        ),
        Constraint(
            "chunk size",
            "a chunk hides a wait only where it keeps the tensor cores busy for 160 to 256 cycles",
            lambda p, problem, limits: _chunks_are_long(p, problem),
        ),
        Constraint(
            "registers",
            "output, scores and weights stay in the 240 registers of a thread",
            lambda p, problem, limits: (
                _columns(p) // 2 + _STEP_REGISTERS + _OTHER_REGISTERS <= _REGISTERS
            ),
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
    threads=lambda p, problem: _THREADS,
)
