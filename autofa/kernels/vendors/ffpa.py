"""ffpa-attn (`pip install ffpa-attn`): head dims above 256, in Triton and in CuTe DSL.

Its public function hands to SDPA what it does not serve itself, with SDPA's other causal corner;
the domains below are what its kernels serve, and they are called past that function.
"""

from __future__ import annotations

from autofa.kernels.family import Constraint, Domain, HeadDims
from autofa.kernels.vendor import NO_EMPTY_ROWS, UPPER_LEFT_SQUARE, VendorKernel

_LENGTHS = Constraint(
    "lengths",
    "made for 512 or more keys, and for 512 or more queries or fewer than 8",
    lambda _, p, __: p.seqlen_k >= 512 and (p.seqlen_q >= 512 or p.seqlen_q < 8),
)

KERNELS = (
    VendorKernel(
        "ffpa.triton",
        "(ffpa triton)",
        (
            Domain(
                "cuda",
                ("f16", "bf16"),
                HeadDims(step=8, first=264, last=1024),
                masks=("none", "causal", "causal_lower_right"),
                min_arch=80,
                unequal_head_dims=False,
                extra=(UPPER_LEFT_SQUARE, NO_EMPTY_ROWS, _LENGTHS),
            ),
        ),
        library="ffpa-attn",
        about="ffpa-attn's Triton forward; compiles at its first call of a kind",
    ),
    VendorKernel(
        "ffpa.cute",
        "(ffpa cute)",
        (
            Domain(
                "cuda",
                ("f16", "bf16"),
                HeadDims(step=32, first=320, last=1024),
                # Its paths for sm_80 and sm_90 differ in their corner; on a square they agree.
                masks=("none", "causal"),
                min_arch=80,
                unequal_causal=False,
                unequal_head_dims=False,
            ),
        ),
        library="ffpa-attn",
        about="ffpa-attn's CuTe DSL forward; compiles at its first call of a kind",
    ),
)
