"""The wheel `fa3-fwd`: FlashAttention-3's forward for bf16, without f16 and without a backward."""

from __future__ import annotations

from autofa.kernels.vendor import VendorKernel
from autofa.kernels.vendors.flash_attn3 import domain

KERNELS = (
    VendorKernel(
        "fa3_fwd.fwd",
        "(fa3-fwd)",
        (domain(("bf16",)),),
        library="fa3-fwd",
        about="FlashAttention-3's forward as the wheel fa3-fwd has it: bf16 only",
    ),
)
