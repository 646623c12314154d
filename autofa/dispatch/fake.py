"""What the operators return, without computing it: shapes, dtype and strides for tracing.

The strides are a function of the query's alone, the same for every kernel: dense, in the query's
order, head dim innermost. csrc/runtime/call.cpp (fill_output) is the twin of `output_strides`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_registered: list[str] = []


def output_sizes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> list[int]:
    """The output's sizes: the leading dims broadcast, grouped heads as many as the query's."""
    leads = [list(t.shape[:-2]) for t in (query, key, value)]
    rank = max(len(lead) for lead in leads)
    padded = [[1] * (rank - len(lead)) + lead for lead in leads]
    sizes = []
    for i, (q, k, v) in enumerate(zip(*padded, strict=True)):
        if enable_gqa and i == rank - 1:
            sizes.append(q)
        else:
            sizes.append(q if q != 1 else k if k != 1 else v)
    return [*sizes, query.shape[-2], value.shape[-1]]


def output_strides(sizes: Sequence[int], query: Tensor) -> Sequence[int]:
    """Dense strides for `sizes` in the order of the query's, head dim innermost."""
    return strides(tuple(sizes), tuple(query.shape), query.stride())


def strides(
    sizes: tuple[int, ...], shape: tuple[int, ...], own: tuple[int, ...]
) -> tuple[int, ...]:
    """`output_strides`, of a query of that shape and those strides."""
    leading = len(sizes) - 1
    order = list(reversed(range(leading)))  # leading dims, innermost first
    if len(shape) == len(sizes):
        for i in range(1, leading):
            place = i
            for j in reversed(range(i)):
                inner, outer = order[j], order[place]
                a, b = own[inner], own[outer]
                if a == 0 or b == 0:
                    continue
                if a < b:
                    break
                if a == b and shape[inner] <= shape[outer]:
                    continue
                order[j], order[place] = order[place], order[j]
                place = j
    result = [1] * len(sizes)
    stride = sizes[-1] if sizes[-1] > 0 else 1
    for dim in order:
        result[dim] = stride
        stride = stride * (sizes[dim] if sizes[dim] > 0 else 1)
    return tuple(result)


# Of calls on real tensors, whose sizes can be hashed: 0.3 us where finding out takes 2.
known_strides = lru_cache(4096)(strides)


def output(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> Tensor:
    """An uninitialised tensor as the operators return it."""
    # One meta tensor is enough for torch to come here, whatever the others are.
    others = (key, value) if attn_mask is None else (key, value, attn_mask)
    torch._check(  # type: ignore[no-untyped-call]
        all(tensor.device == query.device for tensor in others),
        lambda: (
            f"device: got query {query.device}, others {[str(t.device) for t in others]}; "
            "supported: one device for all; move them"
        ),
    )
    torch._check(  # type: ignore[no-untyped-call]
        key.shape[-2] == value.shape[-2],
        lambda: (
            f"length: got key {tuple(key.shape)}, value {tuple(value.shape)}; supported: one "
            "length for both; slice one of them"
        ),
    )
    sizes = output_sizes(query, key, value, enable_gqa)
    return query.new_empty_strided(sizes, output_strides(sizes, query))


def _fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    lower_right: bool = False,
) -> Tensor:
    return output(query, key, value, attn_mask, enable_gqa)


def _run(
    kernel: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    lower_right: bool = False,
) -> Tensor:
    return output(query, key, value, attn_mask, enable_gqa)


def register() -> None:
    """Gives the operators their fake implementations. The runtime library must be loaded."""
    for name, function in (("autofa::fwd", _fwd), ("autofa::run", _run)):
        if name not in _registered:
            torch.library.register_fake(name, function)
            _registered.append(name)
