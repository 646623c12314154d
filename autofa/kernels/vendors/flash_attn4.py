"""FlashAttention-4 (`pip install --pre flash-attn-4`): CuTe DSL, compiled at the first call."""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels.family import Constraint, Domain, HeadDims
from autofa.kernels.vendor import NO_EMPTY_ROWS, UPPER_LEFT_SQUARE, VendorKernel
from autofa.problem import Problem


def _has_tiles(problem: Problem, limits: Limits) -> bool:
    """What its own check of head dims lets pass; on sm_80 and sm_120, which it does not check,
    what fits into their shared memory."""
    d, d_v = problem.head_dim, problem.head_dim_v
    if limits.capability == 90:
        return True
    if 100 <= limits.capability < 120:
        return max(d, d_v) <= 128 or (d, d_v) in ((192, 128), (256, 256))
    return d == d_v <= 128


KERNELS = (
    VendorKernel(
        "flash_attn4.fwd",
        "(flash-attn 4)",
        (
            Domain(
                "cuda",
                ("f16", "bf16"),
                # Padded to multiples of 8, which is what it takes.
                HeadDims(last=256),
                masks=("none", "causal", "causal_lower_right"),
                min_arch=80,
                max_arch=121,
                extra=(
                    UPPER_LEFT_SQUARE,
                    NO_EMPTY_ROWS,
                    Constraint(
                        "head dims",
                        "above 128, or unequal, only where it has tiles for them (sm_90; a few on "
                        "sm_100)",
                        lambda _, p, limits: _has_tiles(p, limits),
                    ),
                ),
            ),
        ),
        library="flash-attn-4",
        about="FlashAttention-4 (flash_attn.cute); compiles at its first call of a kind",
    ),
)
