"""torch's attention backends, taken apart: the forward with its log-sum-exp, and the backward fed
with an output and a log-sum-exp that another kernel computed.

Everywhere here the log-sum-exp is natural, f32, (B, H, Nq), and -inf on rows that see no key; each
backend's own form is converted at its edge. Found by trying torch 2.11 and 2.13: flash has that
shape, efficient wants rows up to a multiple of 32, cuDNN a last dim of 1, CPU flash the strides of
(B, Nq, H). The backwards turn to NaN everywhere by -inf and are exact with +inf, which makes every
weight of such a row 0. Flash, cuDNN and CPU flash read grouped heads as they are; efficient wants
them repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from autofa.runtime.block_backward import block_backward
from autofa.runtime.tensors import positive, whole_rows

_ATEN = torch.ops.aten
_CPU_FORWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
_CPU_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
_FLASH_FORWARD = _ATEN._scaled_dot_product_flash_attention.default
_FLASH_BACKWARD = _ATEN._scaled_dot_product_flash_attention_backward.default
_EFFICIENT_FORWARD = _ATEN._scaled_dot_product_efficient_attention.default
_EFFICIENT_BACKWARD = _ATEN._scaled_dot_product_efficient_attention_backward.default
_CUDNN_FORWARD = _ATEN._scaled_dot_product_cudnn_attention.default
_CUDNN_BACKWARD = _ATEN._scaled_dot_product_cudnn_attention_backward.default

Gradients = tuple[Tensor, Tensor, Tensor]


class Call(NamedTuple):
    """A valid call of the operator, its arguments in their order.

    Attributes:
        lower_right: where `causal` holds, the triangle hangs on the lower-right corner.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float | None
    enable_gqa: bool
    lower_right: bool

    @property
    def triangle(self) -> bool:
        """Whether it is causal as torch's `is_causal` means it."""
        return self.causal and not self.lower_right


@dataclass(frozen=True)
class Backend:
    """One of torch's kernels, or what does better than it.

    Attributes:
        forward: a call as `normalised` gives it -> output and log-sum-exp; differentiable. None
            where torch has none that gives both.
        backward: (gradient of the output, such a call, output, log-sum-exp) -> those of query, key
            and value.
    """

    name: str
    forward: Callable[[Call], tuple[Tensor, Tensor]] | None
    backward: Callable[[Tensor, Call, Tensor, Tensor], Gradients]


def normalised(call: Call) -> tuple[Call, float]:
    """The call with tensors of 4 dims and a positive scale; what its query was multiplied by.

    torch's kernels mask before they scale: by a scale of 0 or less, what is hidden turns to NaN.
    """
    query, key, value, mask, causal, scale, enable_gqa, lower_right = call
    query, scale, factor = positive(query, scale)
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    if query.dim() == 3:
        query, key, value = query[None], key[None], value[None]
        mask = mask[None] if mask is not None and mask.dim() == 3 else mask
    return Call(query, key, value, mask, causal, scale, enable_gqa, lower_right), factor


def bias_of(call: Call) -> Tensor | None:
    """The mask, or the triangle of the lower-right corner, as numbers to add to the scores."""
    rows, keys = call.query.shape[-2], call.key.shape[-2]
    mask = whole_rows(call.mask, keys)
    if call.causal and call.lower_right:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=call.query.device)
        mask = mask.tril_(keys - rows)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=call.query.dtype).masked_fill_(~mask, -math.inf)
    per_head = mask is not None and mask.dim() == 3 and call.query.dim() == 4
    return mask.unsqueeze(0) if mask is not None and per_head else mask


# A bias in which any score is lost.
_LOST = -1e30


def _blind(out: Tensor, bias: Tensor | None) -> Tensor | None:
    """True where a row sees no key; None where no row can be."""
    if bias is None:
        return None
    return (bias == -math.inf).all(-1).expand(out.shape[:-1])


def _ours(lse: Tensor, bias: Tensor | None) -> Tensor:
    """-inf in rows that see nothing; where every score is lost in its bias, the largest bias: the
    efficient kernel gives 0 there (2.11, an H200)."""
    lse = lse.detach().float()
    if bias is not None:
        most = bias.detach().amax(-1).expand(lse.shape).float()
        lse = torch.where(most < _LOST, most, lse)
    return lse.contiguous()


def _theirs(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -math.inf, math.inf)


def _cpu_forward(call: Call) -> tuple[Tensor, Tensor]:
    bias = bias_of(call)
    out, lse = _CPU_FORWARD(*call[:3], 0.0, call.triangle, attn_mask=bias, scale=call.scale)
    return out, _ours(lse, bias)


def _cpu_backward(grad: Tensor, call: Call, out: Tensor, lse: Tensor) -> Gradients:
    bias = bias_of(call)
    lse = lse if bias is None else _theirs(lse)
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    found: Gradients = _CPU_BACKWARD(
        grad, *call[:3], out, lse, 0.0, call.triangle, attn_mask=bias, scale=call.scale
    )
    return found


# Flash's triangle always hangs on the lower-right corner; on a square that is the other one too.


def _flash_forward(call: Call) -> tuple[Tensor, Tensor]:
    out, lse = _FLASH_FORWARD(*call[:3], 0.0, call.causal, scale=call.scale)[:2]
    return out, lse.detach().masked_fill(lse == math.inf, -math.inf)


def _flash_backward(grad: Tensor, call: Call, out: Tensor, lse: Tensor) -> Gradients:
    seed = torch.zeros(2, dtype=torch.uint64, device=out.device)
    lengths = (None, None, call.query.shape[-2], call.key.shape[-2])
    results = (out, _theirs(lse))
    found: Gradients = _FLASH_BACKWARD(
        grad, *call[:3], *results, *lengths, 0.0, call.causal, seed, seed, scale=call.scale
    )
    return found


def _wide_bias(bias: Tensor | None, query: Tensor) -> Tensor | None:
    """For every row of every head, rows aligned as the efficient kernel reads them."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    if keys % 16:
        padded = bias.new_empty(*bias.shape[:-1], keys // 16 * 16 + 16)
        bias = padded[..., :keys].copy_(bias)
    return bias.to(query.dtype).expand(*query.shape[:-1], keys)


def _rows_first(tensor: Tensor) -> Tensor:
    """(B, H, N, D), laid out as (B, N, H, D)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    groups = query.shape[1] // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)


def _efficient_forward(call: Call) -> tuple[Tensor, Tensor]:
    query, bias = call.query, bias_of(call)
    tensors = (query, _repeated(call.key, query), _repeated(call.value, query))
    wide = _wide_bias(bias, query)
    out, lse = _EFFICIENT_FORWARD(*tensors, wide, True, 0.0, call.triangle, scale=call.scale)[:2]
    return out, _ours(lse[..., : query.shape[-2]], bias)


def _efficient_backward(grad: Tensor, call: Call, out: Tensor, lse: Tensor) -> Gradients:
    query = call.query
    lse = torch.nn.functional.pad(_theirs(lse), (0, -query.shape[-2] % 32), value=math.inf)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    # In 16 bits it multiplies the two as if both lay as its forward gives the output: other strides
    # gave gradients that were off by more than 1 (2.11, an H200).
    grad, out = _rows_first(grad), _rows_first(out)
    tensors = (grad, query, _repeated(call.key, query), _repeated(call.value, query))
    rest = (_wide_bias(bias_of(call), query), out, lse, seed, seed, 0.0)
    wanted = [True, True, True, False]
    dq, dk, dv, _ = _EFFICIENT_BACKWARD(*tensors, *rest, wanted, call.triangle, scale=call.scale)
    return dq, _summed(dk, call.key), _summed(dv, call.value)


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    """Over the query heads that read one key head."""
    if gradient.shape == like.shape:
        return gradient
    batch, heads, *rest = like.shape
    return gradient.reshape(batch, heads, -1, *rest).sum(2)


def _cudnn_forward(call: Call) -> tuple[Tensor, Tensor]:
    bias = bias_of(call)
    out, lse = _CUDNN_FORWARD(*call[:3], bias, True, 0.0, call.triangle, scale=call.scale)[:2]
    blind = _blind(out, bias)
    if blind is not None:
        out = torch.where(blind[..., None], 0.0, out)  # cuDNN gives a mean of the values
    return out, _ours(lse.view(out.shape[:-1]), bias)


def _cudnn_backward(grad: Tensor, call: Call, out: Tensor, lse: Tensor) -> Gradients:
    seed = torch.zeros((), dtype=torch.int64, device=out.device)
    lengths = (None, None, call.query.shape[-2], call.key.shape[-2])
    results = (out, _theirs(lse).unsqueeze(-1), seed, seed, bias_of(call))
    found: Gradients = _CUDNN_BACKWARD(
        grad, *call[:3], *results, *lengths, 0.0, call.triangle, scale=call.scale
    )
    return found


def _block_backward(grad: Tensor, call: Call, out: Tensor, lse: Tensor) -> Gradients:
    assert call.scale is not None
    return block_backward(
        grad, *call[:3], bias_of(call), out, lse, causal=call.triangle, scale=call.scale
    )


CPU_FLASH = Backend("cpu flash", _cpu_forward, _cpu_backward)
FLASH = Backend("flash", _flash_forward, _flash_backward)
EFFICIENT = Backend("efficient", _efficient_forward, _efficient_backward)
CUDNN = Backend("cudnn", _cudnn_forward, _cudnn_backward)
WIDE = Backend("efficient, backward by blocks", _efficient_forward, _block_backward)
BLOCKS = Backend("backward by blocks", None, _block_backward)

_choice = torch._fused_sdp_choice
_ON_CPU = {int(SDPBackend.FLASH_ATTENTION.value): CPU_FLASH}
_ON_CUDA = {
    int(SDPBackend.FLASH_ATTENTION.value): FLASH,
    int(SDPBackend.EFFICIENT_ATTENTION.value): EFFICIENT,
    int(SDPBackend.CUDNN_ATTENTION.value): CUDNN,
}
_FLASH_HEAD_DIMS = 256
# Scores from which on blocks are faster than the efficient backward: on an H200 half as fast with
# half a million, 3.7 to 5.6 times with 8 million, 1.1 to 6 times beyond.
_WORTH_BLOCKS = 1 << 22


def chosen(call: Call) -> Backend | None:
    """The backend that SDPA picks for these tensors, as they are with their `requires_grad`; where
    its backward is slow or its composite form keeps all scores, the backward by blocks instead.

    None where nothing is to be computed, and for tensors of other than 3 or 4 dims.
    """
    query, key, value, mask, causal, _, enable_gqa, lower_right = call
    if not (query.numel() and key.numel() and value.numel()) or query.dim() not in (3, 4):
        return None  # torch divides by the number of key heads, and dies of none (2.13)
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        return BLOCKS
    if query.dim() == 3:
        query, key, value = query[None], key[None], value[None]
    if causal and lower_right and query.device.type == "cuda":
        served = query.shape[-1] == value.shape[-1] <= _FLASH_HEAD_DIMS
        return FLASH if served and query.dtype in (torch.float16, torch.bfloat16) else BLOCKS
    triangle = causal and not lower_right
    choice = _choice(query, key, value, mask, 0.0, triangle, scale=None, enable_gqa=enable_gqa)
    found = (_ON_CUDA if query.is_cuda else _ON_CPU).get(choice, BLOCKS)
    if found is EFFICIENT and query.shape[-1] > _FLASH_HEAD_DIMS:
        scores = math.prod(query.shape[:-1]) * key.shape[-2]
        return WIDE if scores >= _WORTH_BLOCKS else EFFICIENT
    return found
