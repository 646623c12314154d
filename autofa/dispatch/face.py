"""`attention`: branches once between the operator and torch's own route, as cheaply as it can.

On a 2-core Xeon with torch 2.13 the questions of the direct path cost 0.3 us together, where a tiny
SDPA call costs 7 us (benchmarks/call_overhead.py prints them).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch._C._nn import scaled_dot_product_attention as sdpa  # F's own, whatever F holds now
from torch.autograd import forward_ad

from autofa.dispatch import forcing, routes, state
from autofa.dispatch.arguments import check_kinds
from autofa.dispatch.routes import is_lower_right, is_plain
from autofa.dispatch.shortcut import MEMORY, learn, restride
from autofa.errors import AutofaError, NotApplicableError
from autofa.kernels.vendor import BASELINE
from autofa.runtime.tensors import validate

log = logging.getLogger("autofa")

_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch._C._get_deterministic_algorithms
_function_mode = torch._C._is_torch_function_mode_enabled
_functorch = torch._C._functorch.peek_interpreter_stack
_grad_enabled = torch.is_grad_enabled
_num_threads = torch.get_num_threads
_tracing = torch.compiler.is_dynamo_compiling

state.start()
_state = state.STATE
_fwd = _state.fwd
_memory = MEMORY


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
) -> Tensor:
    """Scaled dot product attention by the fastest kernel known for this shape on this device.

    Signature and meaning of `torch.nn.functional.scaled_dot_product_attention`. Calls that need
    gradients or dropout, tensor subclasses and autocast are served by that function itself; so is
    whatever no other kernel covers. `attn_mask` together with `is_causal` means both.

    Args:
        query, key, value: (..., Nq, D), (..., Nk, D), (..., Nk, Dv); any strides; leading dims
            broadcast.
        attn_mask: broadcasts to (..., Nq, Nk); bool (True: attend), or added to the scores; or
            `torch.nn.attention.bias.causal_lower_right(Nq, Nk)`.
        is_causal: query i attends to keys 0 ... i (upper-left corner).
        scale: of the scores; 1 / sqrt(D) by default.
        enable_gqa: fewer key than query heads (dim -3); query head h reads key head
            h // (Hq // Hkv).

    Returns:
        (..., Nq, Dv), its leading dims laid out in the order of the query's.

    Raises:
        UsageError: shapes, lengths or devices that do not fit (a ValueError).
        DTypeError: dtypes that differ or are not supported (a TypeError).
        NotApplicableError: a kernel is forced that does not serve this call.

    Never raises because of the database or the cache of compiled kernels. Thread-safe.
    """
    if _tracing():
        return _traced(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
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
            )
            if _memory.watching:
                known = _memory.by_query.get(query.shape)
                if known is None:
                    sdpa_wins = None
                elif known:
                    # Written out, in the order that _signature has: calling it costs 0.1 us.
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
            return _elsewhere(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if sdpa_wins:
            # Torch's own function needs none of the questions below. An argument that is not
            # needed costs it 0.1 us, a keyword 0.4.
            if (
                usual
                and attn_mask is None
                and scale is None
                and not enable_gqa
                and query.is_contiguous()
            ):
                try:
                    won = (
                        sdpa(query, key, value, None, 0.0, True)
                        if is_causal
                        else sdpa(query, key, value)
                    )
                except RuntimeError as error:
                    _explain_failure(error, query, key, value, is_causal=is_causal)
                    raise
                return won.contiguous()  # itself, where it is
            return _won(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if (
            usual
            and not (
                _grad_enabled()
                and (
                    query.requires_grad
                    or key.requires_grad
                    or value.requires_grad
                    or (attn_mask is not None and attn_mask.requires_grad)
                )
            )
            and not _any_autocast()
            and not _function_mode()
            and _functorch() is None
            and forward_ad._current_level < 0
            and _deterministic() is _state.deterministic
        ):
            try:
                out: Tensor = _fwd(query, key, value, attn_mask, is_causal, scale, enable_gqa)
            except RuntimeError as error:
                return _recover(error, query, key, value, attn_mask, is_causal, scale, enable_gqa)
            if sdpa_wins is None:
                rest = _signature(query, key, value, attn_mask, is_causal, enable_gqa)
                learn(rest, query, key, value, attn_mask, is_causal, enable_gqa)
            return out
    return _elsewhere(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _signature(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> tuple[Any, ...]:
    """All but the query's shape that decides which kernel serves a call."""
    return (
        key.shape,
        value.shape,
        query.dtype,
        query.get_device(),
        _num_threads(),
        is_causal,
        enable_gqa,
        None if attn_mask is None else (attn_mask.shape, attn_mask.dtype),
    )


def _won(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """A call that plain SDPA is known to win."""
    call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    try:
        out = routes.plain(*call)
    except Exception as error:
        _explain_failure(error, *call)
        raise
    if out.stride() == query.stride():
        return out
    return restride(out, query, key, value, enable_gqa)


def _elsewhere(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """What the direct path could not say yes to at once."""
    call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    try:
        return _asked(*call)
    except Exception as error:
        _explain_failure(error, *call)
        raise


def _asked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The call by the route that the answers to all questions leave."""
    if _state.deterministic is not _deterministic():
        _state.refresh()
    slug = None if _state.direct else forcing.forced()
    if slug is not None or type(is_causal) is not bool or type(enable_gqa) is not bool:
        check_kinds(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and is_plain(query) and is_plain(key):
        attn_mask, is_causal = routes.one_corner(attn_mask, is_causal, query, key)
    reason = _state.off or routes.why_sdpa(query, key, value, attn_mask, dropout_p)
    if slug is not None and slug != BASELINE:
        if reason:
            raise forcing.not_applicable(slug, reason)
        return forcing.attend(slug, query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if reason or slug is not None:
        out = routes.plain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return out if reason else restride(out, query, key, value, enable_gqa)
    lower_right = attn_mask is not None and is_lower_right(attn_mask)
    mask = None if lower_right else attn_mask
    try:
        return _fwd(
            query, key, value, mask, is_causal or lower_right, scale, enable_gqa, lower_right
        )
    except RuntimeError as error:
        return _recover(error, query, key, value, attn_mask, is_causal, scale, enable_gqa)


def _explain_failure(
    error: Exception,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """Raises what is wrong with the arguments, if that is what failed."""
    if isinstance(error, (torch.OutOfMemoryError, AutofaError)):
        return
    check_kinds(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if all(map(is_plain, (query, key, value))):
        validate(query, key, value, attn_mask, is_causal, enable_gqa)


def _recover(
    error: RuntimeError,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The operator refused: says what is wrong with the arguments, or lets torch serve them."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    call = (query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    _explain_failure(error, *call)
    # A device, or a way of writing an argument, that torch takes and the operator does not.
    log.debug("the operator refused a call (%s); torch serves it", error)
    return routes.plain(*call)


def _traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The branch as TorchDynamo traces it: no table, no database, no exception handling."""
    if _state.forced is not None or _state.forcing:
        raise NotApplicableError(
            "forced kernel: got a call inside a compiled graph; supported: eager calls; "
            "drop force_kernel or torch.compile"
        )
    if _state.off or routes.why_sdpa_traced(query, key, value, attn_mask, dropout_p):
        return routes.plain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    op = torch.ops.autofa.fwd.default
    out: Tensor = op(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return out
