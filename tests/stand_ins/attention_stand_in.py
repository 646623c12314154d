"""What all stand-ins for attention libraries share: attention on (B, N, H, D), on the CPU, with the
corner, the checks and the empty rows that the libraries have."""

from __future__ import annotations

import torch
from torch import Tensor

from autofa.runtime import vendors

# The libraries serve CUDA; their stand-ins are reached on the CPU.
vendors.KEYS = ("CPU",)

# Addresses of the queries, keys, values and outputs of all calls, and a length that makes one fail.
calls: list[tuple[int, int, int, int]] = []
FAILING_LENGTH = 77


def check(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, step: int = 8) -> None:
    """Raises RuntimeError for what these libraries do not take."""
    batch, rows, heads, width = q.shape
    keys, heads_kv = k.shape[1], k.shape[2]
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("only fp16 and bf16")
    if k.shape != (batch, keys, heads_kv, width) or v.shape[:3] != k.shape[:3]:
        raise RuntimeError(f"shapes {q.shape} {k.shape} {v.shape}")
    if out.shape != (batch, rows, heads, v.shape[3]) or out.dtype != q.dtype:
        raise RuntimeError(f"output {out.shape} {out.dtype}")
    if width % step or v.shape[3] % step or heads % heads_kv:
        raise RuntimeError("head dims or heads")
    for tensor in (q, k, v, out):
        strides = tensor.stride()
        if strides[3] != 1 or tensor.data_ptr() % 16 or any(2 * s % 16 for s in strides[:3]):
            raise RuntimeError(f"strides {strides} at {tensor.data_ptr()}")
        if any(s == 0 for s in strides):
            raise RuntimeError("broadcast strides")
    if rows == FAILING_LENGTH:
        raise RuntimeError("a length that this library fails at")


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float, causal: bool, empty: float
) -> Tensor:
    """Writes attention to `out`; the log-sum-exp, (B, H, N), `empty` where a row sees nothing."""
    calls.append((q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()))
    groups = q.shape[2] // k.shape[2]
    heads_first = [t.transpose(1, 2).double() for t in (q, k, v)]
    key, value = (t.repeat_interleave(groups, 1) for t in heads_first[1:])
    scores = heads_first[0] @ key.mT * scale
    rows, keys = scores.shape[-2:]
    if causal:
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(1 + keys - rows)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    result = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0) @ value
    out.copy_(result.transpose(1, 2))
    return lse.masked_fill(lse == float("-inf"), empty).float()
