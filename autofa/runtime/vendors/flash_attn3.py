"""FlashAttention-3: the operator of its extension, which takes (B, N, H, D)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from autofa.runtime.vendors import Kernel

if TYPE_CHECKING:
    from torch import Tensor


def load(name: str) -> Kernel:
    """The forward."""
    return of_package("flash_attn_3")


def of_package(package: str) -> Kernel:
    """The forward that a package's extension registers as `<package>::fwd`."""
    import torch

    import_module(f"{package}._C")
    forward = getattr(torch.ops, package).fwd.default

    def attend(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, causal: bool
    ) -> None:
        # num_splits=0: its own rule, which splits keys where queries are few.
        result = forward(q, k, v, out=out, softmax_scale=scale, is_causal=causal, num_splits=0)
        if lse is not None:
            lse.copy_(result[1])

    return Kernel(attend)
