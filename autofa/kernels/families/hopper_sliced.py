"""`hopper.sliced`: FlashAttention on wgmma and TMA for head dims of 513 to 1024 on sm_90a.

On an H200, bf16 and 1,8,8192, TFLOPS and share of a matmul in the same run:

| head dim | blocks of a cluster, keys of a step | dense | causal |
|---|---|---|---|
| 576 | 3, 48 | 297, 0.39 | |
| 640 | 3, 48 | 308, 0.42 | 310, 0.40 |
| 768 | 3, 48 | 330, 0.47 | |
| 1024 | 4, 64 | 386, 0.55 | 353, 0.46 |

Four blocks with 64 keys took as long at 576 as at 1024. A step of three took some 3,000 cycles at
576 and 3,600 at 768, of which the products are 1,150 and 1,540, and reads and writes of shared
memory 1,650 and 2,060. With weights two steps ahead of their use it was slower, so it is not their
way alone that a step waits for, but the bytes too: for 128 keys of a warpgroup's rows three blocks
send 32 KB each, four 36.

Hence steps of 128 keys, of which each two of four blocks share the scores of a half: those send
20 KB for them, 8 of scores and 12 of weights, and meet a third as often. They are not measured. So
the family never answers unmeasured: only `tune` can choose it, which checks each variant that it
times.
"""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels import hopper, mma
from autofa.kernels.family import Constraint, KernelFamily, Param, Params, Value
from autofa.problem import Problem

_STAGES = (3, 4, 5, 6, 7, 8)
_THREADS = 128 * 3  # two warpgroups that compute, and the producer's
_COLUMNS = 256  # at most, of a slice: one product's
_VALUE_COLUMNS = (576, 640, 672, 768, 896, 1024)  # of three blocks and of four


def _ranks(p: Params) -> int:
    """Blocks of a cluster, each with its part of the output's columns."""
    return 4 if _paired(p) else int(p.block_n) // 16


def _paired(p: Params) -> bool:
    """Each two of four blocks have the scores of half of a step's keys."""
    return int(p.block_n) == 128


def _parts(p: Params) -> int:
    """Slices of the head dim, of queries and keys."""
    return 2 if _paired(p) else _ranks(p)


def _slice(p: Params, problem: Problem) -> int:
    """Columns of queries and keys in one block."""
    return mma.columns(problem.head_dim, 16 * _parts(p)) // _parts(p)


def _stage_bytes(p: Params) -> int:
    keys = int(p.block_n) if _ranks(p) == 3 else 64 if _paired(p) and p.key_groups > 2 else 32
    values = keys * hopper.groups(int(p.columns_v) // _ranks(p))
    scored = 64 if _paired(p) else int(p.block_n)
    return hopper.ROW_BYTES * max(scored * int(p.key_groups), values)


def _fixed_bytes(p: Params, problem: Problem) -> int:
    """For each warpgroup its queries; of each other block two buffers for scores, some for weights
    and row maxima, and its row sums; its own weights unless registers hold them; and the barriers
    of them all."""
    queries = 64 * hopper.ROW_BYTES * hopper.groups(_slice(p, problem))
    rows = 64 * 4
    if _paired(p):
        score_sets = 1 if int(p.columns_v) > 768 else 2
        exchange = score_sets * 64 * 32 * 4 + 3 * (64 * 32 * 2 + 2 * rows)
        return 2 * (queries + exchange + 8 * hopper.BARRIER_BYTES)
    scores, weights = 64 * 16 * 4, 64 * 16 * 2
    sets = int(p.lag) + 1
    others = 2 * scores + sets * (weights + rows) + rows
    exchange = (_ranks(p) - 1) * others + int(p.lag) * weights
    return 2 * (queries + exchange + (5 + sets) * hopper.BARRIER_BYTES)


def _smem_bytes(p: Params, problem: Problem) -> int:
    return _fixed_bytes(p, problem) + int(p.stages) * (_stage_bytes(p) + 2 * hopper.BARRIER_BYTES)


def _stages(p: Params, problem: Problem, limits: Limits) -> int:
    """The deepest ring that fits; 0 if none does."""
    free = limits.smem_per_block - _fixed_bytes(p, problem)
    return hopper.deepest(_STAGES, free, _stage_bytes(p))


def _groups_fit(p: Params, problem: Problem) -> bool:
    """The slice's groups in as few chunks as can be of so many."""
    groups = hopper.groups(_slice(p, problem))
    if _paired(p):
        return int(p.key_groups) <= 3
    return p.key_groups <= groups and -(-groups // int(p.key_groups)) <= 2


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """Steps of 128 keys, up to where they leave room for four chunks."""
    paired = max(problem.head_dim, problem.head_dim_v) <= 896
    p = Params(
        block_m=128,
        block_n=128 if paired else 64,
        columns_v=mma.columns(problem.head_dim_v, 128),
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
        mma.block_n(48, 64, 128),
        Param("columns_v", _VALUE_COLUMNS, "v{}", about="value head dim, filled up"),
        Param("key_groups", (2, 3, 4), "c{}", about="64-column groups in a chunk of keys"),
        hopper.stages(_STAGES),
        Param(
            "early", (0, 1), "e{}", about="1: softmax beside the first chunk of values, 0: the last"
        ),
        Param("lag", (1, 2), "l{}", about="steps between weights and their use"),
        hopper.heads(),
    ),
    constraints=(
        Constraint(
            "value columns",
            "the output has the value head dim's columns, filled up to a multiple of 32 for each "
            "block of the cluster",
            lambda p, problem, limits: (
                p.columns_v == mma.columns(problem.head_dim_v, 32 * _ranks(p))
            ),
        ),
        Constraint(
            "slices",
            "a block of the cluster has at most 256 columns",
            lambda p, problem, limits: (
                max(_slice(p, problem) * _parts(p) // _ranks(p), int(p.columns_v) // _ranks(p))
                <= _COLUMNS
            ),
        ),
        hopper.heads_in_turn(),
        Constraint(
            "chunk size",
            "a slice of keys comes in one or two chunks, a half of the head dim in more",
            lambda p, problem, limits: _groups_fit(p, problem),
        ),
        Constraint(
            "one chunk of values",
            "three blocks have the values of a step in one chunk, the first and the last",
            lambda p, problem, limits: p.early == 0 or _ranks(p) % 2 == 0,
        ),
        Constraint(
            "weights in registers",
            "with 128 keys, weights are sent a step ahead, and if early beside the second of four "
            "chunks of values",
            lambda p, problem, limits: (
                not _paired(p) or (p.lag == 1 and (p.early == 0 or p.key_groups == 2))
            ),
        ),
        mma.shared_memory(_smem_bytes),
        hopper.no_idle_memory(_stages),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=lambda p, problem: _THREADS,
)
