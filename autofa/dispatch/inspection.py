"""`explain`: what attention would do with these arguments, and why, without doing it."""

from __future__ import annotations

import torch
from torch import Tensor

from autofa.device import DeviceKey, Limits
from autofa.dispatch import forcing, routes, state
from autofa.dispatch.arguments import check_kinds
from autofa.dispatch.branches import as_call
from autofa.dispatch.explanation import Explanation
from autofa.dispatch.ladder import Question
from autofa.kernels.vendor import BASELINE
from autofa.problem import Problem
from autofa.runtime import devices
from autofa.runtime.tensors import problem_of, sdpa_only, validate


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Explanation:
    """Which kernel `attention` uses for these arguments, from which rung of the ladder, and why.

    Runs, loads and builds nothing. Speaks of the eager mode, whose measure is `call_ms`.

    Raises:
        AutofaError: what `attention` would raise for the same arguments.
    """
    state.start()
    check_kinds(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and routes.is_plain(query) and routes.is_plain(key):
        attn_mask, is_causal = routes.one_corner(attn_mask, is_causal, query, key)
    reason = state.STATE.off or routes.why_sdpa(query, key, value, attn_mask, dropout_p)
    if reason:
        if all(map(routes.is_plain, (query, key, value))) and "autocast" not in reason:
            mask = attn_mask if attn_mask is None or routes.is_plain(attn_mask) else None
            validate(query, key, value, mask, is_causal, enable_gqa)
        return _by_sdpa(reason)
    if attn_mask is not None and is_causal:
        validate(query, key, value, attn_mask, is_causal, enable_gqa)
    call = as_call(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    named = (*call[:5], enable_gqa)
    validate(*named)
    why = sdpa_only(*named)
    if why is not None:
        return _by_sdpa(why)
    if not query.numel():
        return Explanation(BASELINE, "sdpa", "there is nothing to compute")
    problem = problem_of(*named, lower_right=call.lower_right)
    trains = routes.need_gradients(*call[:3])
    return explain_problem(
        problem,
        devices.device_key(query.device),
        devices.limits(query.device),
        needs_lse=trains,
    )


def _by_sdpa(reason: str) -> Explanation:
    """A call that plain SDPA serves whatever its shape; an error where another is forced."""
    slug = forcing.forced()
    if slug is not None and slug != BASELINE:
        raise forcing.not_applicable(slug, reason)
    return Explanation(BASELINE, "sdpa", reason)


def explain_problem(
    problem: Problem,
    device: DeviceKey,
    limits: Limits,
    mode: str = "eager",
    *,
    needs_lse: bool = False,
) -> Explanation:
    """`explain` for a problem on a device that need not be here.

    Args:
        mode: `eager` (ranked by `call_ms`) or `graph` (by `time_ms`).
        needs_lse: gradients, or the log-sum-exp, are wanted too.

    Raises:
        UsageError: a kernel is forced that does not exist.
        NotApplicableError: one that does not serve this problem.
    """
    state.start()
    slug = forcing.forced()
    if slug is not None:
        question = Question(problem, device, limits, mode, precision="fast", needs_lse=needs_lse)
        forcing.serving(slug, question)
        return Explanation(slug, "forced", "AUTOFA_FORCE_KERNEL or force_kernel names it")
    table = state.STATE.table
    if table is None:
        return Explanation(BASELINE, "sdpa", state.STATE.off)
    question = Question(
        problem,
        device,
        limits,
        mode,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        precision=state.STATE.precision,
        needs_lse=needs_lse,
        told=True,
    )
    return table.decide(question, table.known(device)).explanation
