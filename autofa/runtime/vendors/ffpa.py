"""ffpa-attn: its Triton forward on (B, H, N, D), and its CuTe DSL forward on (B, N, H, D)."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from autofa.runtime.vendors import Kernel
from autofa.runtime.vendors.signature import require_parameters

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def load(name: str) -> Kernel:
    """The kernel `triton` or `cute`.

    Raises:
        ImportError: absent, or another version's functions.
    """
    return _triton() if name == "triton" else _cute()


def _triton() -> Kernel:
    import torch

    forward = import_module("ffpa_attn.triton._ffpa_fwd")._ffpa_attn_forward_impl
    require_parameters(forward, ("o", "lse", "causal", "softmax_scale"))

    def attend(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, causal: bool
    ) -> None:
        batch, heads, rows, _ = q.shape
        # Written in whole tiles of up to 128 rows.
        size = (batch, heads, (rows + 127) // 128 * 128)
        own = torch.empty(size, dtype=torch.float32, device=q.device)
        forward(q, k, v, out, own, causal=causal, softmax_scale=scale)
        if lse is not None:
            lse.copy_(own[..., :rows])

    return Kernel(attend, compiles=True)


@cache
def _writes_to(device: torch.device) -> bool:
    """Whether its kernels there write to a given (B, N, H, D) output; some choose another order."""
    import torch

    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _cute() -> Kernel:
    package = import_module("ffpa_attn.cute")
    forward_of = package._forward_impl_for_device

    def attend(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, causal: bool
    ) -> None:
        forward = forward_of(q.device, q.size(-1), v.size(-1))
        target = out if out.is_contiguous() and _writes_to(q.device) else None
        made, _ = forward(
            q,
            k,
            v,
            softmax_scale=scale,
            causal=causal,
            return_lse=lse is not None,
            out=target,
            lse=lse,
        )
        if target is None:
            out.copy_(made)

    return Kernel(attend, compiles=True)
