"""FlashAttention-3 as built from the folder `hopper` of flash-attention's sources."""

from __future__ import annotations

from autofa.kernels.family import Constraint, Domain, HeadDims
from autofa.kernels.vendor import UPPER_LEFT_SQUARE, VendorKernel
from autofa.problem import Problem


def _instantiated(problem: Problem) -> bool:
    d, d_v = problem.head_dim, problem.head_dim_v
    return d == d_v or (128 < d <= 192 and 96 < d_v <= 128) or (d <= 64 and d_v <= 256)


UNEQUAL_HEAD_DIMS = Constraint(
    "head dims",
    "head_dim_v != head_dim needs sm_90, and (128, 192] with (96, 128] or up to 64 with up to 256",
    lambda _, p, limits: (
        p.head_dim == p.head_dim_v or (limits.capability == 90 and _instantiated(p))
    ),
)


def domain(dtypes: tuple[str, ...]) -> Domain:
    """What a build with these dtypes serves."""
    return Domain(
        "cuda",
        dtypes,
        # Padded to multiples of 8, which is what it takes.
        HeadDims(last=256),
        masks=("none", "causal", "causal_lower_right"),
        # It has machine code of sm_80 and sm_90a and no PTX.
        min_arch=80,
        max_arch=90,
        extra=(UPPER_LEFT_SQUARE, UNEQUAL_HEAD_DIMS),
    )


KERNELS = (
    VendorKernel(
        "flash_attn3.fwd",
        "(flash-attn 3)",
        (domain(("f16", "bf16")),),
        library="flash_attn_3",
        about="FlashAttention-3, the build of flash-attention's folder hopper",
    ),
)
