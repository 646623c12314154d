"""flash-attn 2 (`pip install flash-attn`). Its causal corner is the lower-right one since 2.1."""

from __future__ import annotations

from autofa.kernels.family import Domain, HeadDims
from autofa.kernels.vendor import GRID, UPPER_LEFT_SQUARE, VendorKernel

KERNELS = (
    VendorKernel(
        "flash_attn2.fwd",
        "(flash-attn 2)",
        (
            Domain(
                "cuda",
                ("f16", "bf16"),
                # Padded to multiples of 8, which is what it takes.
                HeadDims(last=256),
                masks=("none", "causal", "causal_lower_right"),
                min_arch=80,
                unequal_head_dims=False,
                extra=(UPPER_LEFT_SQUARE, GRID),
            ),
        ),
        library="flash-attn",
        about="flash_attn's forward, version 2.6 or newer",
    ),
)
