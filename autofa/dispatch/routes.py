"""Which calls torch's own function serves, and that function with what it gets wrong put right."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._nn import scaled_dot_product_attention as sdpa  # F's own, whatever F holds now
from torch.autograd import forward_ad

from autofa.dispatch.keys import DEVICE_TYPES
from autofa.dispatch.mending import blind_rows, mended, nothing_seen, rows_to_keep, sees_nothing
from autofa.runtime.tensors import positive, validate

# Subclasses that are ordinary tensors to whoever computes with them: modules' parameters, and the
# stand-ins that tracers put in a tensor's place.
_PLAIN_MODULES = frozenset(("torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor"))

# Modes that mean nothing to attention: torch.set_default_device (active for ever, changes factory
# functions only), and those of tracers, which want the operator in their graph.
_INDIFFERENT = ("torch.utils._device", "torch._export", "torch.export", "torch.fx.experimental")


def is_plain(value: object) -> bool:
    """Whether this is a tensor without a meaning of its own."""
    kind = type(value)
    if isinstance(value, Tensor) and value.is_nested:
        return False  # those of torch's strided layout have no type of their own
    if kind is Tensor or kind is torch.nn.Parameter:
        return True
    return kind.__module__ in _PLAIN_MODULES and isinstance(value, Tensor)


def is_lower_right(mask: object) -> bool:
    """Whether this is what `torch.nn.attention.bias.causal_lower_right` returns."""
    if type(mask).__name__ != "CausalBias":
        return False
    from torch.nn.attention.bias import CausalBias, CausalVariant

    return isinstance(mask, CausalBias) and mask.variant is CausalVariant.LOWER_RIGHT


def one_corner(
    attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
) -> tuple[Tensor | None, bool]:
    """A lower-right bias together with `is_causal` means both: of the two triangles, the smaller.

    With at least as many keys as queries that is the upper-left one, else the lower-right one.
    """
    if not is_causal or attn_mask is None or not is_lower_right(attn_mask):
        return attn_mask, is_causal
    if not _fits(attn_mask, query, key):
        return attn_mask, is_causal
    if key.shape[-2] >= query.shape[-2]:
        return None, True
    return attn_mask, False


def _fits(mask: object, query: Tensor, key: Tensor) -> bool:
    """Whether a lower-right bias is of the call's very lengths; else torch says what is wrong."""
    sizes = getattr(mask, "seq_len_q", None), getattr(mask, "seq_len_kv", None)
    return sizes == (query.shape[-2], key.shape[-2])


def why_sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float
) -> str:
    """Why plain SDPA serves this call whatever its shape; empty if the operator may."""
    for name, value_ in (("query", query), ("key", key), ("value", value)):
        if not is_plain(value_):
            nested = isinstance(value_, Tensor) and value_.is_nested
            kind = "nested tensor" if nested else type(value_).__name__
            return f"{name} is a {kind}, which torch serves itself"
    tensors = [query, key, value]
    if attn_mask is not None:
        lower_right = is_lower_right(attn_mask)
        if not (is_plain(attn_mask) or (lower_right and _fits(attn_mask, query, key))):
            return f"attn_mask is a {type(attn_mask).__name__}, which torch serves itself"
        if not lower_right:
            tensors.append(attn_mask)
    if dropout_p != 0.0:  # not merely true: None, say, is for torch to refuse
        return "dropout"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors[3:]):
        return "attn_mask needs gradients"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a functorch transform is active"
    if torch._C._get_tracing_state() is not None:
        # It makes tensors of sizes, and compares what it records with and without gradients.
        return "torch.jit.trace is recording"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    if _meaningful_function_mode():
        return "a torch function mode is active"
    return ""


def need_gradients(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )


def autocast(tensor: Tensor) -> Tensor:
    """A plain tensor as torch's autocast hands it to SDPA."""
    kind = tensor.device.type
    if (
        kind not in DEVICE_TYPES
        or not torch.is_autocast_enabled(kind)
        or not tensor.is_floating_point()
        or tensor.dtype == torch.float64
    ):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _meaningful_function_mode() -> bool:
    """Whether a torch function mode is active, those that look the other way aside."""
    if not torch._C._is_torch_function_mode_enabled():
        return False
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(not type(mode).__module__.startswith(_INDIFFERENT) for mode in modes)


def why_sdpa_traced(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float
) -> str:
    """`why_sdpa` in words that TorchDynamo can trace."""
    for tensor in (query, key, value):
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            return "a tensor subclass"
    if attn_mask is not None and type(attn_mask) is not Tensor:
        return "a mask of a kind of its own"
    if dropout_p:
        return "dropout"
    if torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
    ):
        return "gradients are needed"
    if torch.is_autocast_enabled(query.device.type):
        return "autocast"
    return ""


def both_masks(attn_mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """`attn_mask` and the upper-left causal triangle as one mask: SDPA's backends disagree."""
    rows = torch.arange(query.shape[-2], device=query.device)
    columns = torch.arange(key.shape[-2], device=query.device)
    visible = columns <= rows[:, None]
    if attn_mask.dtype == torch.bool:
        return attn_mask & visible
    return attn_mask.masked_fill(~visible, float("-inf"))


def untouched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """torch's own function, also while `torch.nn.functional` holds another one.

    A `CausalBias` knows a call of SDPA only by the very object that is there (torch 2.13).
    """
    if attn_mask is not None and type(attn_mask).__name__ == "CausalBias":
        held = torch.nn.functional.scaled_dot_product_attention
        if held is not sdpa:
            kind = type(attn_mask)
            call = (query, key, value, attn_mask, dropout_p, is_causal)
            rest = {"scale": scale, "enable_gqa": enable_gqa}
            biased: Tensor = kind.__torch_function__(held, (kind,), call, rest)  # type: ignore[no-untyped-call]
            return biased
    return sdpa(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """torch's own function; for plain tensors with both masks merged and lengths checked.

    Raises:
        UsageError: plain tensors that do not fit each other. torch itself reads past the end of a
            key that is shorter than the value.
    """
    known = is_plain(query) and is_plain(key) and is_plain(value)
    if torch._C._get_tracing_state() is not None:
        known = False  # torch.jit.trace makes tensors of sizes: nothing is asked of them
    if known and attn_mask is not None:
        attn_mask, is_causal = one_corner(attn_mask, is_causal, query, key)
    if not known:
        return untouched(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if key.dim() < 2 or value.dim() < 2 or key.shape[-2] != value.shape[-2]:
        validate(query, key, value, attn_mask, is_causal, enable_gqa)
    bias = attn_mask is not None and not is_plain(attn_mask)
    lower_right = bias and is_lower_right(attn_mask) and _fits(attn_mask, query, key)
    if query.is_cuda and (not bias or lower_right) and sees_nothing(query, key, value, enable_gqa):
        validate(query, key, value, None if bias else attn_mask, is_causal, enable_gqa)
        return nothing_seen(query, key, value, enable_gqa)
    if lower_right and (blind := blind_rows(query, key)):
        seeing = query[..., blind:, :]
        out = plain(seeing, key, value, None, dropout_p, True, scale, enable_gqa)
        return torch.nn.functional.pad(out, (0, 0, blind, 0))
    query, key, value, mask = mended(query, key, value, None if bias else attn_mask, enable_gqa)
    attn_mask = attn_mask if bias else mask
    if is_causal and attn_mask is not None and not bias:
        attn_mask, is_causal = both_masks(attn_mask, query, key), False
    query, scale, factor = positive(query, scale)
    kept = None if bias else rows_to_keep(query, key, value, attn_mask, enable_gqa)
    out = untouched(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if kept is not None:
        out = torch.where(kept, out, 0.0)
    return out if factor == factor else out * factor
