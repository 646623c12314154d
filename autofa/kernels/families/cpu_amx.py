"""`cpu.amx`: flash attention in bf16 on the tiles of AMX."""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels.family import Constraint, Domain, KernelFamily, Param, Params, Value
from autofa.problem import Problem


def _has_amx(p: Params, problem: Problem, limits: Limits) -> bool:
    return "amx_bf16" in limits.features


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    # Batches of as many groups of 32 keys as the outputs have chunks share the tiles best.
    return {"block_q": 128, "block_k": 64 if problem.head_dim_v <= 64 else 256}


def _surely_faster(problem: Problem, limits: Limits) -> bool:
    """Where the default measured faster than SDPA on AMX throughout: 1.2x and more.

    What is left out: 32 queries share each tile, so a few against many keys lose (0.5x with one,
    0.9-1.1x with 16); outputs of head dims above 256 leave the first-level cache (0.9-1.8x), and
    with additive masks 256 brings nothing (1.0x).
    """
    p = problem
    widest = max(p.head_dim, p.head_dim_v)
    if widest > (128 if p.mask == "additive" else 256):
        return False
    return p.seqlen_q >= 32 or (p.seqlen_q >= 16 and p.seqlen_k <= 256 and widest <= 128)


FAMILY = KernelFamily(
    name="cpu.amx",
    title="cpu(amx)",
    version=1,
    folder="cpu_amx",
    entry="kernel.h",
    domain=Domain(
        device="cpu",
        dtypes=("bf16",),
        min_arch=4,
        max_arch=4,
        extra=(
            Constraint("amx", "needs a CPU with AMX-BF16 (Sapphire Rapids and newer)", _has_amx),
        ),
    ),
    params=(
        Param("block_q", (32, 64, 128), "q{}", about="queries of a task"),
        Param("block_k", (64, 128, 256), "k{}", joined=True, about="keys between two additions"),
    ),
    specialised=("dtype",),
    # The instructions beyond AVX-512 are assembly in the source.
    target=lambda p, limits: "x86-64-v4",
    default=_default,
    unmeasured=_surely_faster,
)
