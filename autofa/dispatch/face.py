"""`attention`: branches once between the operator and torch's own route, as cheaply as it can.

On a 2-core Xeon with torch 2.13 the questions of the direct path cost 0.3 us together, where a tiny
SDPA call costs 7 us (benchmarks/call_overhead.py prints them).
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from autofa.dispatch import state
from autofa.dispatch.arguments import check_kinds
from autofa.dispatch.branches import differentiable, elsewhere, recover, traced, with_lse, won
from autofa.dispatch.shortcut import MEMORY, TRAINING, learn
from autofa.runtime.backends import Call

_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch._C._get_deterministic_algorithms
_function_mode = torch._C._is_torch_function_mode_enabled
_functorch = torch._C._functorch.peek_interpreter_stack
_grad_enabled = torch.is_grad_enabled
_num_threads = torch.get_num_threads
_recording = torch._C._get_tracing_state
_tracing = torch.compiler.is_dynamo_compiling

state.start()
_state = state.STATE
_fwd = _state.fwd
_face = _state.face
_memory = MEMORY
_training = TRAINING


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    *,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    *,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot product attention by the fastest kernel known for this shape on this device.

    Signature and meaning of `torch.nn.functional.scaled_dot_product_attention`. Calls with dropout
    or tensor subclasses are served by that function itself; so is whatever no other kernel covers.
    `attn_mask` together with `is_causal` means both. Gradients come from the backward that SDPA
    would have used, fed with the output of the kernel that won.

    Args:
        query, key, value: (..., Nq, D), (..., Nk, D), (..., Nk, Dv); any strides; leading dims
            broadcast.
        attn_mask: broadcasts to (..., Nq, Nk); bool (True: attend), or added to the scores; or
            `torch.nn.attention.bias.causal_lower_right(Nq, Nk)`.
        is_causal: query i attends to keys 0 ... i (upper-left corner).
        scale: of the scores; 1 / sqrt(D) by default.
        enable_gqa: fewer key than query heads (dim -3); query head h reads key head
            h // (Hq // Hkv).
        return_lse: the log-sum-exp of the scores too; not with dropout.

    Returns:
        (..., Nq, Dv), its leading dims laid out in the order of the query's. With `return_lse` a
        tuple of that and (..., Nq) in f32: natural logarithms, -inf on rows that see no key, not
        differentiable.

    Raises:
        UsageError: shapes, lengths or devices that do not fit (a ValueError).
        DTypeError: dtypes that differ or are not supported (a TypeError).
        NotApplicableError: a kernel is forced that does not serve this call.

    Never raises because of the database or the cache of compiled kernels. Thread-safe.
    """
    if return_lse:
        return with_lse(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if _tracing():
        return traced(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is None and _state.direct:
        known: Any = _face(query, key, value, dropout_p, is_causal, scale, enable_gqa)
        if known is not None:
            found: Tensor = known
            return found
    if (
        _state.direct
        and type(query) is Tensor
        and type(key) is Tensor
        and type(value) is Tensor
        and (attn_mask is None or type(attn_mask) is Tensor)
    ):
        # The operator takes for a bool whatever is true or false, and for a float whatever can be
        # made one; torch's own function does not.
        if scale is not None and type(scale) is not float:
            check_kinds(query, key, value, scale=scale)
        sdpa_wins: bool | None = False
        try:
            usual = (
                dropout_p == 0.0
                and (is_causal is False or is_causal is True)
                and (enable_gqa is False or enable_gqa is True)
                and not (is_causal and attn_mask is not None)  # become one mask first
            )
            trains = _grad_enabled() and (
                query.requires_grad
                or key.requires_grad
                or value.requires_grad
                or (attn_mask is not None and attn_mask.requires_grad)
            )
            memory = _training if trains else _memory
            if memory.watching:
                known = memory.by_query.get(query.shape)
                if known is None:
                    sdpa_wins = None
                elif known:
                    # Written out, in the order of shortcut.signature: calling it costs 0.1 us.
                    sdpa_wins = known.get(
                        (
                            key.shape,
                            value.shape,
                            query.dtype,
                            query.get_device(),
                            _num_threads(),
                            is_causal,
                            enable_gqa,
                            None if attn_mask is None else (attn_mask.shape, attn_mask.dtype),
                        )
                    )
        except (RuntimeError, TypeError, ValueError):  # nested tensors have no shape
            return elsewhere(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if sdpa_wins:
            # Torch's own function needs none of the questions below.
            if usual:
                return won(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
            return elsewhere(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if (
            usual
            and not _any_autocast()
            and not _function_mode()
            and _functorch() is None
            and _recording() is None
            and forward_ad._current_level < 0
            and _deterministic() is _state.deterministic
        ):
            if trains:
                if attn_mask is None or not attn_mask.requires_grad:
                    call = Call(query, key, value, attn_mask, is_causal, scale, enable_gqa, False)
                    return differentiable(call)
                return elsewhere(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
            try:
                out: Tensor = _fwd(query, key, value, attn_mask, is_causal, scale, enable_gqa)
            except RuntimeError as error:
                return recover(error, query, key, value, attn_mask, is_causal, scale, enable_gqa)
            if sdpa_wins is None:
                learn(query, key, value, attn_mask, is_causal, enable_gqa)
            return out
    return elsewhere(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
