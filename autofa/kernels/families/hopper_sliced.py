"""`hopper.sliced`: FlashAttention on wgmma and TMA for head dims of 513 to 1024 on sm_90a.

Three thread blocks, up to 768, take steps of 96 keys, whose weights are sent at once, or of 48, for
which they are sent a step ahead; four take 64. In one run on an H200, bf16 and 1,8,8192, as shares
of a matmul of 8192^3 (plain SDPA had 0.16 to 0.18):

| head dim | keys | e0 | e1 |
|---|---|---|---|
| 768 | 96 | 0.59 (466 TFLOPS) | 0.57 |
| 768 | 48 | 0.51 | 0.54 |
| 768 causal, 8 heads in turn | 96 | 0.50 | 0.49 |
| 768 causal, 8 heads in turn | 48 | 0.47 | 0.51 (402 TFLOPS) |
| 1024 | 64 | 0.60 (468 TFLOPS) | 0.53 |

In other runs 768 had 0.54 (f16 too; causal 0.51 again, 0.50 with 16 heads in turn, 0.48 with 4) and
1024 0.54 to 0.63 (causal 0.53), the more the cooler the GPU. What blocks send each other decides,
not the products: of four a call took as long at 576 as at 1024.

What was tried and lost in that run: 48 keys weighed at once (0.48 dense, 0.48 causal) or two
steps ahead (0.54, 0.49), 64 at once (0.54), 96 with their weights a step ahead (0.29) or two groups
a chunk (0.48). In earlier runs: the softmax beside the first chunk of values, 64 keys two steps
ahead, and halves of the head dim times halves of the keys, with steps of 128 keys. Up to 640
`hopper.cluster_split_d` was faster than steps of 48 keys; those of 96 are not yet compared with it.

The family never answers unmeasured: only `tune` can choose it, which checks each variant that it
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


def _wide(p: Params) -> bool:
    """Whether a step is long enough to need its weights only once they are worked out."""
    return int(p.block_n) == 96


def _keys(p: Params) -> int:
    """Of a step, in one block: those whose weights it works out."""
    return 32 if _wide(p) else 16


def _ranks(p: Params) -> int:
    """Blocks of a cluster, each with a slice of the head dim and some keys of a step."""
    return int(p.block_n) // _keys(p)


def _slice(p: Params, problem: Problem) -> int:
    """Columns of queries and keys in one block."""
    return mma.columns(problem.head_dim, 16 * _ranks(p)) // _ranks(p)


def _stage_bytes(p: Params) -> int:
    keys = 32 if _ranks(p) % 2 == 0 or _wide(p) else int(p.block_n)
    values = keys * hopper.groups(int(p.columns_v) // _ranks(p))
    return hopper.ROW_BYTES * max(int(p.block_n) * int(p.key_groups), values)


def _fixed_bytes(p: Params, problem: Problem) -> int:
    """For each warpgroup its queries; of each other block one or two buffers for scores, for
    weights and row maxima, and its row sums; its own weights; and the barriers of them all."""
    queries = 64 * hopper.ROW_BYTES * hopper.groups(_slice(p, problem))
    scores, weights, rows = 64 * _keys(p) * 4, 64 * _keys(p) * 2, 64 * 4
    lag = 0 if _wide(p) else 1
    others = (lag + 1) * (scores + weights + rows) + rows
    exchange = (_ranks(p) - 1) * others + lag * weights
    return 2 * (queries + exchange + (3 + 2 * (lag + 1)) * hopper.BARRIER_BYTES)


def _smem_bytes(p: Params, problem: Problem) -> int:
    return _fixed_bytes(p, problem) + int(p.stages) * (_stage_bytes(p) + 2 * hopper.BARRIER_BYTES)


def _stages(p: Params, problem: Problem, limits: Limits) -> int:
    """The deepest ring that fits; 0 if none does."""
    free = limits.smem_per_block - _fixed_bytes(p, problem)
    return hopper.deepest(_STAGES, free, _stage_bytes(p))


def _groups_fit(p: Params, problem: Problem) -> bool:
    if _wide(p):
        return int(p.key_groups) == 1
    groups = hopper.groups(_slice(p, problem))
    return groups <= 2 * int(p.key_groups) <= 2 * groups


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """Few blocks in a cluster: they send each other less, and more of them find an SM."""
    ranks = 3 if max(problem.head_dim, problem.head_dim_v) <= 3 * _COLUMNS else 4
    narrow = ranks == 3 and problem.causal
    p = Params(
        block_m=128,
        block_n=64 if ranks == 4 else 48 if narrow else 96,
        columns_v=mma.columns(problem.head_dim_v, 32 * ranks),
        key_groups=2 if ranks == 4 else 1,
        stages=0,
        early=int(narrow),
        heads=hopper.default_heads(problem),
    )
    if narrow:
        p.key_groups = hopper.groups(_slice(p, problem))
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
        mma.block_n(48, 64, 96),
        Param("columns_v", _VALUE_COLUMNS, "v{}", about="value head dim, filled up"),
        Param("key_groups", (1, 2, 3, 4), "c{}", about="64-column groups in a chunk of keys"),
        hopper.stages(_STAGES),
        Param(
            "early",
            (0, 1),
            "e{}",
            about="1: scores are sent as soon as they are there, else beside the last values",
        ),
        hopper.heads(),
    ),
    constraints=(
        hopper.value_columns(32, _ranks),
        Constraint(
            "slices",
            "a block of the cluster has at most 256 columns",
            lambda p, problem, limits: (
                max(_slice(p, problem), int(p.columns_v) // _ranks(p)) <= _COLUMNS
            ),
        ),
        hopper.heads_in_turn(),
        Constraint(
            "chunk size",
            "a slice of keys comes in one or two chunks, of 96 keys in one for each group",
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
