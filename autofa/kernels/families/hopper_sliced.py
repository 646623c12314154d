"""`hopper.sliced`: FlashAttention on wgmma and TMA for head dims of 513 to 1024 on sm_90a.

Nothing of it is measured: it was run on an emulator and compiled for sm_90a, and no GPU has run it.
So it never answers unmeasured: only `tune` can choose it, which checks each variant that it times.
"""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels import hopper, mma
from autofa.kernels.family import Constraint, KernelFamily, Param, Params, Value
from autofa.problem import Problem

_STAGES = (3, 4, 5, 6, 7, 8)
_THREADS = 128 * 3  # two warpgroups that compute, and the producer's
_RANKS = 4  # blocks of a cluster, each with a slice of the head dim


def _slice(problem: Problem) -> int:
    """Columns of queries and keys in one block."""
    return mma.columns(problem.head_dim, 16 * _RANKS) // _RANKS


def _stage_bytes(p: Params) -> int:
    values = 32 * hopper.groups(int(p.columns_v) // _RANKS)
    return hopper.ROW_BYTES * max(64 * int(p.key_groups), values)


def _fixed_bytes(p: Params, problem: Problem) -> int:
    """For each warpgroup its queries; of each other block two buffers for scores, some for weights
    and row maxima, and its row sums; its own weights; and the barriers of them all."""
    queries = 64 * hopper.ROW_BYTES * hopper.groups(_slice(problem))
    scores, weights, rows = 64 * 16 * 4, 64 * 16 * 2, 64 * 4
    sets = int(p.lag) + 1
    others = 2 * scores + sets * (weights + rows) + rows
    exchange = (_RANKS - 1) * others + int(p.lag) * weights
    return 2 * (queries + exchange + (5 + sets) * hopper.BARRIER_BYTES)


def _smem_bytes(p: Params, problem: Problem) -> int:
    return _fixed_bytes(p, problem) + int(p.stages) * (_stage_bytes(p) + 2 * hopper.BARRIER_BYTES)


def _stages(p: Params, problem: Problem, limits: Limits) -> int:
    """The deepest ring that fits; 0 if none does."""
    free = limits.smem_per_block - _fixed_bytes(p, problem)
    return hopper.deepest(_STAGES, free, _stage_bytes(p))


def _groups_fit(p: Params, problem: Problem) -> bool:
    """The slice's groups in as few chunks as can be of so many."""
    groups = hopper.groups(_slice(problem))
    return p.key_groups <= groups and -(-groups // int(p.key_groups)) <= 2


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    p = Params(
        block_m=128,
        block_n=64,
        columns_v=mma.columns(problem.head_dim_v, 32 * _RANKS),
        key_groups=2,
        stages=0,
        early=0,
        lag=1,
        heads=hopper.default_heads(problem),
    )
    p.stages = _stages(p, problem, limits)
    return dict(vars(p))


FAMILY = KernelFamily(
    name="hopper.sliced",
    title="hopper(sliced)",
    version=1,
    folder="hopper_sliced",
    entry="kernel.cuh",
    domain=hopper.domain(520, 1024),
    params=(
        mma.block_m(128),
        mma.block_n(64),
        Param("columns_v", tuple(range(640, 1025, 128)), "v{}", about="value head dim, filled up"),
        Param("key_groups", (2, 3), "c{}", about="64-column groups in a chunk of keys"),
        hopper.stages(_STAGES),
        Param(
            "early", (0, 1), "e{}", about="1: softmax beside the first chunk of values, 0: the last"
        ),
        Param("lag", (1, 2), "l{}", about="steps between weights and their use"),
        hopper.heads(),
    ),
    constraints=(
        hopper.value_columns(32 * _RANKS),
        hopper.heads_in_turn(),
        Constraint(
            "chunk size",
            "a slice of keys comes in one or two chunks",
            lambda p, problem, limits: _groups_fit(p, problem),
        ),
        mma.shared_memory(_smem_bytes),
        hopper.no_idle_memory(_stages),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=lambda p, problem: _THREADS,
)
