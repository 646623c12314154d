"""The backward of attention out of matrix products, some query rows at a time.

For what torch's fused backwards serve badly (head dims above 256) or not at all (head dims that
differ). The equations are those of FlashAttention (Dao et al., 2022, appendix B): weights come back
from scores and log-sum-exp, so that no matrix of all scores is kept from the forward, and here only
one of a few rows is made. Scores and their gradients are f32; what the products read is rounded to
the inputs' dtype, as in the fused kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Scores that are held at once: two matrices in f32, two in the inputs' dtype, 200 MB in bf16.
_SCORES = 1 << 24
_LEAST_ROWS = 128

_is_batched = torch._C._functorch.is_batchedtensor
_is_batched_by_engine = torch._C._functorch.is_legacy_batchedtensor


def _product(a: Tensor, b: Tensor, plus: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """scale * a @ b + plus in f32, of (n, rows, k) and (n, k, columns)."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        if plus is None:
            product = torch.bmm(a, b, out_dtype=torch.float32)
            return product if scale == 1.0 else product.mul_(scale)
        return torch.baddbmm(plus, a, b, alpha=scale, out_dtype=torch.float32)
    product = torch.bmm(a.float(), b.float()).mul_(scale)
    return product if plus is None else product.add_(plus)


def block_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value.

    Args:
        grad, out: (B, Hq, Nq, Dv).
        query, key, value: (B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv).
        bias: added to the scores; broadcasts to (B, Hq, Nq, Nk).
        lse: (B, Hq, Nq), natural, f32; -inf on rows that see no key.
        causal: query i sees keys 0 ... i.

    Where vmap runs it (`is_grads_batched`, a vectorised Jacobian), all scores are made at once: it
    knows no writing into parts of a tensor.
    """
    if _is_batched(grad) or _is_batched_by_engine(grad):
        return _at_once(grad, query, key, value, bias, out, lse, causal=causal, scale=scale)
    batch, heads, rows, _ = query.shape
    keys, groups = key.shape[-2], heads // key.shape[1]
    # Rows whose weights are all 0 need a log-sum-exp that makes them so.
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    delta = (grad.float() * out.float()).sum(-1)
    k, v = (t.flatten(0, 1) for t in (key, value))
    dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    dv = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    dq = torch.empty_like(query)
    if bias is not None:
        bias = bias.expand(batch, heads, rows, keys)
    step = min(rows, max(_LEAST_ROWS, _SCORES // max(1, batch * heads * keys)))
    for first in range(0, rows, step):
        part = slice(first, min(rows, first + step))
        seen = min(keys, part.stop) if causal else keys

        def grouped(tensor: Tensor, part: slice = part) -> Tensor:
            """Rows of the heads that share a key head, one after the other."""
            taken = tensor[:, :, part]
            return taken.reshape(batch * heads // groups, -1, *taken.shape[3:])

        q, g = grouped(query), grouped(grad)
        weights = _product(q, k[:, :seen].mT, -grouped(lse)[..., None], scale)
        if bias is not None:
            weights += grouped(bias)[..., :seen]
        weights = weights.exp_()
        if causal and part.start + 1 < seen:
            own = torch.arange(part.start, part.stop, device=q.device).repeat(groups)
            hidden = torch.arange(seen, device=q.device) > own[:, None]
            weights.masked_fill_(hidden, 0.0)
        change = _product(g, v[:, :seen].mT, -grouped(delta)[..., None])
        change = torch.mul(weights, change, out=change).to(q.dtype)
        dv[:, :seen] += _product(weights.to(q.dtype).mT, g)
        dk[:, :seen] += _product(change.mT, q, scale=scale)
        dq[:, :, part] = _product(change, k[:, :seen], scale=scale).view(
            batch, heads, -1, dq.shape[-1]
        )
    return dq, dk.view(key.shape).to(key.dtype), dv.view(value.shape).to(value.dtype)


def _at_once(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_backward` without writing into any tensor, in f32."""
    batch, heads, rows, _ = query.shape
    keys, groups = key.shape[-2], heads // key.shape[1]
    q, g, o = query.float(), grad.float(), out.float()
    k, v = (t.float().repeat_interleave(groups, 1) for t in (key, value))
    scores = scale * (q @ k.mT) - lse.masked_fill(lse == -math.inf, math.inf)[..., None]
    if bias is not None:
        scores = scores + bias
    if causal:
        seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    weights = scores.exp()
    change = weights * (g @ v.mT - (g * o).sum(-1).unsqueeze(-1))

    def summed(tensor: Tensor) -> Tensor:
        """Over the query heads that read one key head."""
        return tensor.reshape(batch, heads // groups, groups, keys, -1).sum(2)

    dq, dk, dv = scale * (change @ k), scale * (change.mT @ q), weights.mT @ g
    return dq.to(query.dtype), summed(dk).to(key.dtype), summed(dv).to(value.dtype)
