"""The branches of `attention` off its direct path: what asks more questions, or needs more than the
output."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch._C._nn import scaled_dot_product_attention as sdpa  # F's own, whatever F holds now

from autofa.dispatch import forcing, gradients, routes
from autofa.dispatch.arguments import check_kinds
from autofa.dispatch.mending import ordinary
from autofa.dispatch.routes import is_lower_right, is_plain
from autofa.dispatch.shortcut import learn_training, restride
from autofa.dispatch.state import STATE
from autofa.errors import AutofaError, NotApplicableError, UsageError, explain_bad
from autofa.kernels.vendor import BASELINE
from autofa.runtime import kernels
from autofa.runtime.backends import Call
from autofa.runtime.tensors import validate

log = logging.getLogger("autofa")

_deterministic = torch._C._get_deterministic_algorithms
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing = torch.compiler.is_dynamo_compiling

_OF_NUMBERS = frozenset((Tensor, torch.nn.Parameter))


def won(
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
        if (
            attn_mask is None
            and scale is None
            and not enable_gqa
            and ordinary(query)
            and ordinary(key)
            and ordinary(value)
        ):
            # An argument that is not needed costs it 0.1 us, a keyword 0.4.
            out = sdpa(query, key, value, None, 0.0, True) if is_causal else sdpa(query, key, value)
        else:
            out = routes.plain(*call)
    except Exception as error:
        _explain_failure(error, *call)
        raise
    if query.is_contiguous() and out.shape[:-1] == query.shape[:-1]:
        return out.contiguous()  # itself, where it is
    return restride(out, query, key, value, enable_gqa)


def elsewhere(
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
    if STATE.deterministic is not _deterministic():
        STATE.refresh()
    slug = None if STATE.direct else forcing.forced()
    if slug is not None or type(is_causal) is not bool or type(enable_gqa) is not bool:
        check_kinds(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and is_plain(query) and is_plain(key):
        attn_mask, is_causal = routes.one_corner(attn_mask, is_causal, query, key)
    reason = STATE.off or routes.why_sdpa(query, key, value, attn_mask, dropout_p)
    forces = slug is not None and slug != BASELINE
    if reason and forces:
        raise forcing.not_applicable(str(slug), reason)
    if reason or slug == BASELINE:
        out = routes.plain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return out if reason else restride(out, query, key, value, enable_gqa)
    call = as_call(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if forces:
        return forcing.attend(str(slug), call)
    if routes.need_gradients(query, key, value):
        return differentiable(call)
    try:
        return STATE.fwd(*call)
    except RuntimeError as error:
        return recover(error, query, key, value, attn_mask, is_causal, scale, enable_gqa)


def as_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Call:
    """Plain tensors, with or without a lower-right bias, as every kernel takes them."""
    lower_right = attn_mask is not None and is_lower_right(attn_mask)
    mask = None if lower_right or attn_mask is None else routes.autocast(attn_mask)
    if mask is not None and is_causal:
        mask, is_causal = routes.both_masks(mask, query, key), False
    query, key, value = map(routes.autocast, (query, key, value))
    return Call(query, key, value, mask, is_causal or lower_right, scale, enable_gqa, lower_right)


def differentiable(call: Call) -> Tensor:
    """A call that needs gradients of query, key or value."""
    query, key, value, mask, is_causal, scale, enable_gqa, lower_right = call
    if not _computes(query, key, value) or not (query.numel() and key.numel() and value.numel()):
        return routes.plain(
            query, key, value, _bias(call), 0.0, is_causal and not lower_right, scale, enable_gqa
        )
    try:
        plan = gradients.plan_of(STATE.table, call)
        if plan.kernel != kernels.SDPA:
            return gradients.differentiable(plan, call)
        if plan.of_its_kind:
            learn_training(call)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        log.debug("a kernel refused a call with gradients (%s); torch serves it", error)
        if not all(map(is_plain, (query, key, value))):
            return routes.plain(query, key, value, mask, 0.0, is_causal, scale, enable_gqa)
    triangle = is_causal and not lower_right
    return won(query, key, value, _bias(call), 0.0, triangle, scale, enable_gqa)


def _bias(call: Call) -> Tensor | None:
    """The mask of a call, a lower-right bias as torch's own function takes it."""
    if not call.lower_right:
        return call.mask
    # A second to import, which whoever made such a mask has spent.
    from torch.nn.attention.bias import causal_lower_right

    bias: Tensor = causal_lower_right(call.query.shape[-2], call.key.shape[-2])
    return bias


def _computes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether these are numbers on a device of ours, and nobody records what becomes of them."""
    return (
        type(query) in _OF_NUMBERS
        and type(key) in _OF_NUMBERS
        and type(value) in _OF_NUMBERS
        and (query.is_cpu or query.is_cuda)
        and _dispatch_modes() == 0
    )


def with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor]:
    """`attention` with `return_lse`."""
    if _tracing():
        if attn_mask is not None and is_causal:
            attn_mask, is_causal = routes.both_masks(attn_mask, query, key), False
        return gradients.by_parts(
            Call(query, key, value, attn_mask, is_causal, scale, enable_gqa, False)
        )
    check_kinds(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not is_plain(tensor):
            kind = "nested tensor" if tensor.is_nested else type(tensor).__name__
            supported = "plain tensors with return_lse"
            raise UsageError(explain_bad(name, kind, supported, "leave return_lse"))
    if dropout_p:
        raise UsageError(
            explain_bad("dropout_p", dropout_p, "0.0 with return_lse", "leave one of them")
        )
    if attn_mask is not None:
        attn_mask, is_causal = routes.one_corner(attn_mask, is_causal, query, key)
    call = as_call(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    validate(*call[:4], call.causal, enable_gqa)
    slug = forcing.forced()
    reason = STATE.off or routes.why_sdpa(*call[:4], 0.0)
    if not _computes(query, key, value):
        reason = reason or "tensors that hold no numbers"
    if slug is not None and slug != BASELINE:
        if reason:
            raise forcing.not_applicable(slug, reason)
        out, lse = forcing.attend_with_lse(slug, call)
    elif reason or scale != scale:
        out, lse = gradients.by_parts(call)
    else:
        try:
            out, lse = gradients.with_lse(gradients.plan_of(STATE.table, call), call)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            log.debug("a kernel refused a call with its log-sum-exp (%s)", error)
            out, lse = gradients.by_parts(call)
    return restride(out, query, key, value, enable_gqa), lse


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
    # Of a bias that torch serves itself it has said what is wrong, and knows where it belongs.
    if all(map(is_plain, (query, key, value))) and (attn_mask is None or is_plain(attn_mask)):
        validate(query, key, value, attn_mask, is_causal, enable_gqa)


def recover(
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
    out = routes.plain(*call)
    return restride(out, query, key, value, enable_gqa) if is_plain(query) else out


def traced(
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
    if STATE.forced is not None or STATE.forcing:
        raise NotApplicableError(
            "forced kernel: got a call inside a compiled graph; supported: eager calls; "
            "drop force_kernel or torch.compile"
        )
    if STATE.off or routes.why_sdpa_traced(query, key, value, attn_mask, dropout_p):
        return routes.plain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    op = torch.ops.autofa.fwd.default
    out: Tensor = op(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return out
