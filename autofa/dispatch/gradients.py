"""Calls that need more than the output: gradients, or the log-sum-exp.

Where one of our kernels is the winner it computes the forward, and the backward of the backend that
SDPA would have used is fed with its output and log-sum-exp: what follows is SDPA's own backward,
what went before was faster. Everything else is SDPA's differentiable route, untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofa.dispatch import routes
from autofa.dispatch.keys import DEVICE_TYPES, device_index, key_of
from autofa.dispatch.mending import mended, on_grid
from autofa.dispatch.table import NOT_NOW, Table
from autofa.runtime import extension, kernels
from autofa.runtime.abi import FLAG_LSE
from autofa.runtime.backends import Backend, Call, bias_of, chosen, normalised
from autofa.runtime.tensors import problem_of, sdpa_only, validate

_num_threads = torch.get_num_threads


@dataclass(frozen=True)
class Plan:
    """Who serves a call.

    Attributes:
        kernel: the id of the own kernel that computes the forward; `kernels.SDPA`: torch's route.
        backend: whose backward takes its results, and who gives the log-sum-exp otherwise. Asked
            anew for every call, as it hangs on strides and on what the user has switched off.
        of_its_kind: every call of these shapes has that kernel.
    """

    kernel: int
    backend: Backend | None
    of_its_kind: bool = True


_MOST = 4096
_NOTHING = Plan(0, None)
# A kernel stays for as long as the process lives, without a swap to one that is built meanwhile:
# activation checkpointing runs a forward twice and wants the same tensors saved.
_kernels: dict[tuple[Any, ...], int] = {}


def forget() -> None:
    """The table has changed."""
    _kernels.clear()


class _Attention(torch.autograd.Function):
    """One of our forwards with the backward of one of torch's backends."""

    # The call holds query, key and value again: every argument costs 0.1 us, the tensors that need
    # gradients must be among them.
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: Plan, call: Call, with_lse: bool
    ) -> Any:
        out, lse = kernels.run_with_lse(plan.kernel, *call)
        ctx.save_for_backward(query, key, value, call.mask, out, lse)
        ctx.rest = plan.backend, call[4:]
        if not with_lse:
            return out
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        backend, options = ctx.rest
        call = Call(*tensors, *options)
        if torch.is_grad_enabled():  # for a graph of gradients
            found = _differentiable_backward(grad, call)
        elif torch.is_autocast_enabled(grad.device.type):
            with torch.autocast(grad.device.type, enabled=False):
                found = _backward(grad, call, out, lse, backend)
        else:
            found = _backward(grad, call, out, lse, backend)
        return *found, None, None, None


def _backward(
    grad: Tensor, call: Call, out: Tensor, lse: Tensor, backend: Backend
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key and value."""
    grad = on_grid(grad)
    call, factor = normalised(Call(*mended(*call[:4], call.enable_gqa), *call[4:]))
    flat = out.dim() == 3
    if flat:
        grad, out, lse = grad[None], out[None], lse[None]
    dq, dk, dv = backend.backward(grad, call, out, lse)
    if factor != 1:
        dq = dq * factor
    return (dq[0], dk[0], dv[0]) if flat else (dq, dk, dv)


def _differentiable_backward(grad: Tensor, call: Call) -> tuple[Tensor | None, ...]:
    """By torch's composite form, which can be differentiated again and keeps all scores."""
    query, key, value, mask, causal, scale, enable_gqa, lower_right = call
    if lower_right:
        mask, causal = bias_of(call), False
    with sdpa_kernel(SDPBackend.MATH):
        out = routes.plain(query, key, value, mask, 0.0, causal, scale, enable_gqa)
    wanted = [t for t in call[:3] if t.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if t.requires_grad else None for t in call[:3])


# Function.apply without its questions about functorch, which the face has asked: 1 us.
_apply: Callable[..., Any] = super(torch.autograd.Function, _Attention).apply


def plan_of(table: Table | None, call: Call) -> Plan:
    """Who serves such a call.

    Raises:
        AutofaError: bad tensors.
    """
    query, key, value, mask = call[:4]
    signature = (
        query.shape,
        key.shape,
        value.shape,
        query.dtype,
        query.get_device(),
        _num_threads(),
        call.causal,
        call.enable_gqa,
        call.lower_right,
        None if mask is None else (mask.shape, mask.dtype),
    )
    kernel = _kernels.get(signature)
    if kernel is None:
        validate(query, key, value, mask, call.causal, call.enable_gqa)
        if sdpa_only(query, key, value, mask, call.causal, call.enable_gqa) is not None:
            return Plan(kernels.SDPA, chosen(call), of_its_kind=False)
        kernel = _kernel(table, call)
        if kernel == NOT_NOW:
            return Plan(kernels.SDPA, chosen(call), of_its_kind=False)
        if len(_kernels) >= _MOST:
            _kernels.clear()
        _kernels[signature] = kernel
    return planned(kernel, call)


def planned(kernel: int, call: Call) -> Plan:
    """The plan of a call whose forward that kernel computes, if a backward takes its results."""
    if kernel == kernels.SDPA and not call.query.numel():
        return _NOTHING
    backend = chosen(call)
    return Plan(kernels.SDPA if backend is None else kernel, backend)


def _kernel(table: Table | None, call: Call) -> int:
    """The id of the kernel that the ladder gives to such a call."""
    query, key, value, mask, causal, _, enable_gqa, lower_right = call
    if table is None or not (query.numel() and key.numel() and value.numel()):
        return kernels.SDPA
    problem = problem_of(query, key, value, mask, causal, enable_gqa, lower_right=lower_right)
    flags = extension.flags() | FLAG_LSE
    launch_key = key_of(problem, device_index(query.device), graph=False, flags=flags)
    known = extension.table_get(launch_key)
    if known >= 0:
        return known
    kernel = table.miss(launch_key)
    if kernel != NOT_NOW:
        extension.table_set(launch_key, kernel)
    return kernel


def differentiable(plan: Plan, call: Call) -> Tensor:
    """The output, by the plan's kernel.

    Raises:
        RuntimeError: it does not serve this very call, by its alignment for example.
    """
    out: Tensor = _apply(*call[:3], plan, call, False)
    return out


def with_lse(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; gradients flow through the output.

    Raises:
        RuntimeError: as `differentiable`.
    """
    if plan.kernel != kernels.SDPA:
        out, lse = _apply(*call[:3], plan, call, True)
        return out, lse
    if plan.backend is None or plan.backend.forward is None or not call.query.numel():
        return by_parts(call)
    whole, _ = normalised(Call(*mended(*call[:4], call.enable_gqa), *call[4:]))
    out, lse = plan.backend.forward(whole)
    return (out[0], lse[0]) if call.query.dim() == 3 else (out, lse)


def by_parts(call: Call) -> tuple[Tensor, Tensor]:
    """SDPA, and the log-sum-exp by itself: a second q k^T, where no kernel returns both."""
    query, key, value, mask, causal, scale, enable_gqa, lower_right = call
    if lower_right:
        mask, causal = bias_of(call), False
    out = routes.plain(query, key, value, mask, 0.0, causal, scale, enable_gqa)
    with torch.autocast(query.device.type, enabled=False) if _autocasts(query) else nullcontext():
        return out, _log_sums(call, out.shape[:-2])


def _autocasts(tensor: Tensor) -> bool:
    kind = tensor.device.type
    return kind in DEVICE_TYPES and torch.is_autocast_enabled(kind)


# Scores that are held at once.
_SCORES = 1 << 24


def _log_sums(call: Call, leading: torch.Size) -> Tensor:
    """(..., Nq) in f32, -inf where no key is seen; some rows at a time, in a compiled graph all."""
    query, key, scale, bias = call.query.detach(), call.key.detach(), call.scale, bias_of(call)
    if call.enable_gqa and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    query, key = query.to(wide), key.to(wide).transpose(-1, -2)
    query = query * (scale if scale is not None else 1.0 / math.sqrt(max(1, query.shape[-1])))
    rows, keys = query.shape[-2], key.shape[-1]

    def part_of(first: int, part: slice) -> Tensor:
        scores = query[..., part, :] @ key
        if bias is not None:
            own = bias.detach() if bias.shape[-2] == 1 else bias.detach()[..., part, :]
            scores = (scores + own).masked_fill(own == -math.inf, -math.inf)
        if call.triangle:
            places = torch.arange(first, first + scores.shape[-2], device=query.device)
            columns = torch.arange(keys, device=query.device)
            scores = scores.masked_fill(columns > places[:, None], -math.inf)
        return scores.logsumexp(-1).float()

    if torch.compiler.is_compiling() or not isinstance(rows, int) or rows == 0:
        lse = part_of(0, slice(None))
    else:
        step = max(1, _SCORES // max(1, math.prod(leading) * keys))
        parts = [part_of(first, slice(first, first + step)) for first in range(0, rows, step)]
        lse = torch.cat(parts, -1)
    return lse.expand(*leading, rows)
