"""`attn_implementation="autofa"` for the models of Hugging Face transformers.

`register()` adds the attention and the masks under that name; docs/transformers.md shows it in use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autofa.dispatch.face import attention
from autofa.errors import UsageError, explain_bad

NAME = "autofa"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, in the form that transformers calls it.

    Args:
        module: the layer: `is_causal` is read from it where the argument is None.
        query: (batch, heads, length, head dim); `key`, `value` with as many heads or fewer.
        attention_mask: as SDPA takes it, or None.
        position_bias: added to the scores.
        rest: what other implementations need (sliding window, cache positions ...).

    Returns:
        (batch, length, heads, head dim), and None for the weights.

    Raises:
        UsageError: `softcap`, which SDPA has no word for either.
    """
    if rest.get("softcap") is not None:
        raise UsageError(
            explain_bad("softcap", rest["softcap"], "none", 'use attn_implementation="eager"')
        )
    rows = query.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # A mask has the causal triangle in it already, and a single query sees every key. The order is
    # that of transformers: with a length that is a symbol, the result has to be a bool still.
    causal = bool(rows > 1 and attention_mask is None and is_causal)
    if causal and key.shape[2] > rows:
        # Keys that a static cache has room for but nothing in yet: the upper-left triangle of them.
        key, value = key[:, :, :rows], value[:, :, :rows]
        if position_bias is not None:
            position_bias = position_bias[..., :rows]
    mask = attention_mask if position_bias is None else _biased(position_bias, attention_mask)
    groups = query.shape[1] // key.shape[1]
    packed = groups > 1 and rows == 1 and not torch.compiler.is_compiling()
    if packed:
        # One row per head: the heads of a group become rows, and nothing is repeated or grouped.
        query, mask = _as_rows(query, key.shape[1]), _as_rows(mask, key.shape[1])
    elif groups > 1 and mask is not None and query.is_cuda:
        # SDPA's CUDA backends for masks take no groups; where it answers, it would fall back to its
        # slowest. On CPU repeating costs 1.2 to 1.9 times the call.
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    out = attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if packed:
        out = out.reshape(out.shape[0], -1, 1, out.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def _biased(position_bias: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Mask and bias as one additive mask."""
    if attention_mask is None:
        return position_bias
    if attention_mask.dtype == torch.bool:
        return torch.where(attention_mask, position_bias, torch.finfo(position_bias.dtype).min)
    return position_bias + attention_mask


def _as_rows(tensor: Any, heads: int) -> Any:
    """(batch, heads * groups, 1, n) as (batch, heads, groups, n); what all heads share stays."""
    if tensor is None or tensor.shape[1] == 1:
        return tensor
    return tensor.reshape(tensor.shape[0], heads, -1, tensor.shape[-1])


def register() -> None:
    """Makes `attn_implementation="autofa"` known to transformers. Idempotent.

    Raises:
        ImportError: transformers is not installed, or too old to have such a register.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            f"transformers: got {error}; supported: a version with AttentionMaskInterface "
            "(tested: 5.0 and newer); pip install 'autofa[transformers]'"
        ) from error
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
