"""Stands in for ffpa-attn's CuTe DSL forward: (B, N, H, D), into a contiguous output."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from attention_stand_in import attend, check
from torch import Tensor


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    assert softmax_scale
    assert return_lse == (lse is not None)
    assert not causal or q.shape[1] == k.shape[1]
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype)
    assert out.is_contiguous()
    check(q, k, v, out, step=32)
    found = attend(q, k, v, out, softmax_scale, causal, -math.inf)
    if lse is not None:
        lse.copy_(found)
    return out, lse


def _forward_impl_for_device(
    device: torch.device, head_dim: int, head_dim_v: int
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    return _forward
