"""The wheel `fa3-fwd`: FlashAttention-3 under another name."""

from __future__ import annotations

from autofa.runtime.vendors import Kernel
from autofa.runtime.vendors.flash_attn3 import of_package


def load(name: str) -> Kernel:
    """The forward."""
    return of_package("fa3_fwd")
