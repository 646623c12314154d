"""`warmup`: makes a service's first call already the fast one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autofa.dispatch import routes, state
from autofa.dispatch.arguments import check_kinds
from autofa.dispatch.explanation import Explanation
from autofa.dispatch.face import attention
from autofa.dispatch.inspection import explain
from autofa.dispatch.keys import device_index
from autofa.dispatch.table import Table
from autofa.errors import DTypeError, explain_bad
from autofa.problem import Problem
from autofa.runtime import devices, extension
from autofa.runtime.tensors import problem_of, sdpa_only


def warmup(*calls: Problem | Sequence[Any] | Tensor) -> tuple[Explanation, ...]:
    """Loads the database's rows and the winners' libraries, building those that are missing.

    Calls of these kinds after it are fast from the first on, also while a CUDA graph is captured.
    May take seconds to minutes where something has to be compiled.

    Args:
        calls: each a `Problem`, or a tuple of attention's positional arguments, which is then
            called once without gradients; tensors instead of tuples are the arguments of one call:
            `warmup(query, key, value)`. With none: all that was measured on the CPU and on the
            GPUs that this process uses.

    Returns:
        One `Explanation` per call.

    Raises:
        UsageError: an argument of another kind; a device that is not there.
        AutofaError: a winner could not be built.
    """
    state.start()
    table = state.STATE.table
    if not calls:
        return _warm_all(table) if table is not None else ()
    if isinstance(calls[0], Tensor):
        calls = (calls,)
    found = []
    for call in calls:
        if isinstance(call, Problem):
            found.append(_prepare(table, call, devices.find_device(call.device)))
        elif isinstance(call, (tuple, list)) and len(call) >= 3:
            found.append(_warm_call(table, *call))
        else:
            supported = "Problem, or a tuple (query, key, value, attn_mask, dropout_p, is_causal)"
            raise DTypeError(
                explain_bad("warmup", type(call).__name__, supported, "give one of these")
            )
    return tuple(found)


def _warm_all(table: Table) -> tuple[Explanation, ...]:
    places = [torch.device("cpu")]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        places += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return tuple(
        _prepare(table, bucket.problem, device)
        for device in places
        for bucket in table.known(table.place(device.type, device_index(device)).device).buckets
    )


def _warm_call(
    table: Table | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Explanation:
    check_kinds(query, key, value, attn_mask, dropout_p, is_causal)
    grouped = query.dim() > 2 and key.dim() > 2 and query.shape[-3] != key.shape[-3]
    with torch.no_grad():
        explanation = explain(
            query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=grouped
        )
        lower_right = attn_mask is not None and routes.is_lower_right(attn_mask)
        mask = None if lower_right else attn_mask
        causal = is_causal or lower_right
        served = (
            not routes.why_sdpa(query, key, value, attn_mask, dropout_p)
            and sdpa_only(query, key, value, mask, causal, grouped) is None
            and query.numel()
        )
        if table is not None and served:
            problem = problem_of(query, key, value, mask, causal, grouped, lower_right=lower_right)
            explanation = _prepare(table, problem, query.device)
        attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=grouped)
    return explanation


def _prepare(table: Table | None, problem: Problem, device: torch.device) -> Explanation:
    if table is None:
        return Explanation("torch.sdpa", "sdpa", state.STATE.off)
    return table.prepare(problem, device, extension.flags()).explanation
