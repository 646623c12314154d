"""`hopper.sliced`: FlashAttention on wgmma and TMA for head dims of 513 to 1024 on sm_90a.

On an H200, bf16 and 1,8,8192, with clusters of four thread blocks and the softmax beside the last
chunk of values of the step before (`e0-l1`), it reached 455 TFLOPS at 1024, 0.58 of a matmul in the
same run, and 363 causal, 0.46. With weights two steps ahead of their use it was 372 dense, with the
softmax beside the first chunk 356, with both 363. A call took as long at 576 and nearly as long at
768, 256 and 307 TFLOPS: what blocks send each other decides, not the products.

Clusters of three, the default up to 768, reached 297 to 336 at 576, 308 to 371 at 640 and 330 to
382 at 768 (0.39 to 0.49), and 310 at 640 causal: up to 640 `hopper.cluster_split_d` is faster. Four
had 386 to 487 at 1024 (0.54 to 0.63), the more the cooler the GPU. Halves of the head dim times
halves of the keys, with steps of 128 keys, were tried: 260, 308, 368 and, at 1024, 382 where slices
had 418.

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


def _keys(p: Params) -> int:
    """Of a step, in one block: those whose weights it works out."""
    return 32 if p.block_n > 64 else 16


def _ranks(p: Params) -> int:
    """Blocks of a cluster, each with a slice of the head dim and some keys of a step."""
    return int(p.block_n) // _keys(p)


def _slice(p: Params, problem: Problem) -> int:
    """Columns of queries and keys in one block."""
    return mma.columns(problem.head_dim, 16 * _ranks(p)) // _ranks(p)


def _stage_bytes(p: Params) -> int:
    keys = 32 if _ranks(p) % 2 == 0 or p.block_n > 64 else int(p.block_n)
    values = keys * hopper.groups(int(p.columns_v) // _ranks(p))
    return hopper.ROW_BYTES * max(int(p.block_n) * int(p.key_groups), values)


def _fixed_bytes(p: Params, problem: Problem) -> int:
    """For each warpgroup its queries; of each other block some buffers for scores, for weights
    and row maxima, and its row sums; its own weights; and the barriers of them all."""
    queries = 64 * hopper.ROW_BYTES * hopper.groups(_slice(p, problem))
    scores, weights, rows = 64 * _keys(p) * 4, 64 * _keys(p) * 2, 64 * 4
    sets = int(p.lag) + 1
    score_sets = 2 if p.early < 2 and p.lag > 0 else sets
    others = score_sets * scores + sets * (weights + rows) + rows
    exchange = (_ranks(p) - 1) * others + int(p.lag) * weights
    return 2 * (queries + exchange + (3 + score_sets + sets) * hopper.BARRIER_BYTES)


def _smem_bytes(p: Params, problem: Problem) -> int:
    return _fixed_bytes(p, problem) + int(p.stages) * (_stage_bytes(p) + 2 * hopper.BARRIER_BYTES)


def _stages(p: Params, problem: Problem, limits: Limits) -> int:
    """The deepest ring that fits; 0 if none does."""
    free = limits.smem_per_block - _fixed_bytes(p, problem)
    return hopper.deepest(_STAGES, free, _stage_bytes(p))


def _groups_fit(p: Params, problem: Problem) -> bool:
    """The slice's groups in as few chunks as can be of so many; 96 keys need twice as many."""
    groups = hopper.groups(_slice(p, problem))
    wide = p.block_n == 96
    chunks = -(-groups // int(p.key_groups))
    return p.key_groups <= (2 if wide else groups) and chunks <= (4 if wide else 2)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """Few blocks in a cluster: they send each other less, and more of them find an SM."""
    ranks = 3 if max(problem.head_dim, problem.head_dim_v) <= 3 * _COLUMNS else 4
    p = Params(
        block_m=128,
        block_n=16 * ranks,
        columns_v=mma.columns(problem.head_dim_v, 32 * ranks),
        key_groups=2,
        stages=0,
        early=0,
        lag=1,
        heads=hopper.default_heads(problem),
    )
    if ranks == 3:
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
            (0, 1, 2),
            "e{}",
            about="1: softmax beside the first chunk of values, else the last; 2: scores go first",
        ),
        Param("lag", (0, 1, 2), "l{}", about="steps between weights and their use"),
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
            "a slice of keys comes in one or two chunks, of 96 keys in up to four",
            lambda p, problem, limits: _groups_fit(p, problem),
        ),
        Constraint(
            "one chunk of values",
            "of 48 keys it is the first and the last",
            lambda p, problem, limits: (
                p.block_n != 48 or p.early == 0 or (p.early == 2 and p.lag > 0)
            ),
        ),
        Constraint(
            "softmax beside the keys",
            "without a lag it is not beside any chunk of values",
            lambda p, problem, limits: p.early != 1 or p.lag > 0,
        ),
        Constraint(
            "registers",
            "weights of 96 keys are not kept for two steps",
            lambda p, problem, limits: p.block_n != 96 or p.lag < 2,
        ),
        mma.shared_memory(_smem_bytes),
        hopper.no_idle_memory(_stages),
    ),
    target=lambda p, limits: limits.arch,
    default=_default,
    smem_bytes=_smem_bytes,
    threads=lambda p, problem: _THREADS,
)
