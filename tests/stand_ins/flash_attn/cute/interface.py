"""Stands in for FlashAttention-4, which lies in a namespace: there is no flash_attn/__init__.py."""

from __future__ import annotations

import math

import torch
from attention_stand_in import attend, check
from torch import Tensor


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    assert qv is None
    assert softmax_scale is not None
    if out is None:
        out = torch.empty_like(q)
    check(q, k, v, out)
    if causal and q.shape[1] > k.shape[1]:
        raise RuntimeError("rows that see nothing are not known to be right")
    found = attend(q, k, v, out, softmax_scale, causal, -math.inf)
    if lse is not None:
        assert lse.is_contiguous()
        lse.copy_(found)
    return out, lse
