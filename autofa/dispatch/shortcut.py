"""Remembers which exact calls plain SDPA wins, so that those skip the operator.

SDPA called through the operator costs 4 us more than called from Python (torch 2.13 on a Xeon: 10.8
against 6.8 us for a tiny call), which is lost where SDPA is the winner. Looking its shapes up here
costs 0.6 us, and 0.2 us where SDPA wins no call with such a query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autofa.dispatch import fake
from autofa.dispatch.keys import DEVICE_TYPES, device_index, key_of
from autofa.runtime import extension, kernels, python_face
from autofa.runtime.backends import Call
from autofa.runtime.tensors import problem_of, sdpa_only

# Forgotten all at once beyond this many, so that ever new shapes cannot fill the memory.
_MOST = 4096


class Memory:
    """What was learnt. One dict operation at a time, so threads need no lock.

    Attributes:
        watching: SDPA has won some look-up, so there is something to learn.
        by_query: query shape -> the rest of the call (`signature`) -> whether plain SDPA wins it;
            an empty dict: it won no call with such a query.
    """

    __slots__ = ("by_query", "watching")

    def __init__(self) -> None:
        self.watching = False
        self.by_query: dict[torch.Size, dict[tuple[Any, ...], bool]] = {}


MEMORY = Memory()
TRAINING = Memory()  # of calls that need gradients


def signature(
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
        torch.get_num_threads(),
        is_causal,
        enable_gqa,
        None if attn_mask is None else (attn_mask.shape, attn_mask.dtype),
    )


def sdpa_won() -> None:
    """A look-up ended at plain SDPA: calls that were thought to be others' may be of its kind."""
    MEMORY.by_query.clear()
    MEMORY.watching = True
    python_face.watch()
    python_face.forget()


def forget() -> None:
    """The table has changed."""
    MEMORY.by_query.clear()
    TRAINING.by_query.clear()
    python_face.forget()


def learn_training(call: Call) -> None:
    """Notes that plain SDPA serves a call that needs gradients."""
    query, key, value, mask, causal, _, enable_gqa, lower_right = call
    if lower_right:
        return
    memory = TRAINING.by_query
    if len(memory) >= _MOST:
        memory.clear()
    known = memory.setdefault(query.shape, {})
    if len(known) >= _MOST:
        known.clear()
    known[signature(query, key, value, mask, causal, enable_gqa)] = True
    TRAINING.watching = True
    if mask is None:
        python_face.remember(query, key, value, causal, enable_gqa, trains=True, sdpa_wins=True)


def learn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> None:
    """Notes who served this call, which the operator has just answered."""
    memory = MEMORY.by_query
    if len(memory) >= _MOST:
        memory.clear()
    known = memory.setdefault(query.shape, {})
    won = _sdpa_serves(query, key, value, attn_mask, is_causal, enable_gqa)
    if won or known:
        if len(known) >= _MOST:
            known.clear()
        known[signature(query, key, value, attn_mask, is_causal, enable_gqa)] = won
        if attn_mask is None:
            python_face.remember(
                query, key, value, is_causal, enable_gqa, trains=False, sdpa_wins=won
            )
    else:
        python_face.remember_query(query)


def _sdpa_serves(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    if attn_mask is not None and is_causal:
        return False  # the operator merges the two, SDPA's backends disagree
    if not (query.numel() and key.numel() and value.numel()):
        return False  # torch gives what is empty the query's dims, not the broadcast ones
    if query.device.type not in DEVICE_TYPES:
        return False
    if sdpa_only(query, key, value, attn_mask, is_causal, enable_gqa) is not None:
        return True
    problem = problem_of(query, key, value, attn_mask, is_causal, enable_gqa)
    launch_key = key_of(problem, device_index(query.device), graph=False, flags=extension.flags())
    return extension.table_get(launch_key) == kernels.SDPA


def restride(out: Tensor, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> Tensor:
    """`out` in the strides that every kernel gives; a copy only where they differ."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return out  # strides of a transform's tensors are not the caller's
    find = fake.known_strides if type(out) is Tensor else fake.strides
    strides = find(out.shape, query.shape, query.stride())
    if out.stride() == strides or all(
        size == 1 or have == want
        for size, have, want in zip(out.shape, out.stride(), strides, strict=True)
    ):
        return out
    return out.new_empty_strided(out.shape, strides).copy_(out)
