"""FlashAttention-4: the function below its public one, which alone takes an output to write to."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from autofa.runtime.vendors import Kernel
from autofa.runtime.vendors.signature import require_parameters

if TYPE_CHECKING:
    from torch import Tensor


def load(name: str) -> Kernel:
    """The forward.

    Raises:
        ImportError: absent, or another version's function.
    """
    forward = import_module("flash_attn.cute.interface")._flash_attn_fwd
    require_parameters(forward, ("softmax_scale", "causal", "out", "lse"))

    def attend(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, causal: bool
    ) -> None:
        forward(q, k, v, softmax_scale=scale, causal=causal, out=out, lse=lse)

    return Kernel(attend, compiles=True)
