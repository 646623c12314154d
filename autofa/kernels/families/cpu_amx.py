"""`cpu.amx`: flash attention in bf16 on the tiles of AMX."""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels.family import Constraint, Domain, KernelFamily, Param, Params, Value
from autofa.problem import Problem


def _has_amx(p: Params, problem: Problem, limits: Limits) -> bool:
    return "amx_bf16" in limits.features


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    return {"block_q": 128, "block_k": 128}


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
        Param("block_k", (64, 128, 256, 512), "k{}", joined=True, about="keys of a block"),
    ),
    specialised=("dtype",),
    # The instructions beyond AVX-512 are assembly in the source.
    target=lambda p, limits: "x86-64-v4",
    default=_default,
)
