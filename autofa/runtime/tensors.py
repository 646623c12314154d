"""Tensors as problems: validation with precise errors, classification, random inputs.

csrc/runtime/call.cpp checks and classifies the same on every call; tests hold the two equal.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autofa.errors import DeviceError, DTypeError, UsageError, explain_bad
from autofa.problem import Problem

TORCH_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_ACCEPTED = (*_NAMES, torch.float64)
_MAX_RANK = 16
LAYOUTS = ("bhnd", "bnhd")
_TINY = 2.0**-126  # the smallest number that f32 holds in full


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    named = (("query", query), ("key", key), ("value", value))
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named)


def validate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> None:
    """Raises what is wrong with a call's arguments; returns if nothing is.

    Whatever torch.nn.functional.scaled_dot_product_attention serves without reading out of bounds
    is accepted: sizes of 1 that broadcast, any rank from 2 on, f64.

    Raises:
        DTypeError: dtypes that differ, or that attention is not defined for.
        DeviceError: tensors on different devices.
        UsageError: shapes that do not fit one another.
    """
    dtypes = tuple(str(t.dtype).removeprefix("torch.") for t in (query, key, value))
    if len(set(dtypes)) > 1:
        named = "query {}, key {}, value {}".format(*dtypes)
        raise DTypeError(explain_bad("dtype", named, "one dtype for all three", "cast them to one"))
    if query.dtype not in _ACCEPTED:
        supported = "float32, float16, bfloat16, float64"
        raise DTypeError(
            explain_bad("dtype", dtypes[0], supported, "cast query, key and value to one of these")
        )
    tensors = [query, key, value] + ([] if attn_mask is None else [attn_mask])
    devices = [str(t.device) for t in tensors]
    # A CPU mask of one element is no exception: torch does not take one either.
    if len(set(devices)) > 1:
        got = ", ".join(devices)
        raise DeviceError(explain_bad("device", got, "one device for all", "move them to one"))
    shapes = _shapes(query, key, value)
    if not all(2 <= t.dim() <= _MAX_RANK for t in (query, key, value)):
        raise UsageError(explain_bad("rank", shapes, "(..., N, D)", "add the missing dims"))
    if query.shape[-1] != key.shape[-1]:
        do = "slice or pad one of them"
        raise UsageError(explain_bad("head dim", shapes, "one head dim for query and key", do))
    if key.shape[-2] != value.shape[-2]:
        supported = "one length for key and value"
        raise UsageError(explain_bad("length", shapes, supported, "slice one of them"))
    if enable_gqa and max(t.dim() for t in (query, key, value)) < 3:
        do = "add a dim of heads, or leave the flag"
        raise UsageError(explain_bad("enable_gqa", shapes, "tensors with heads", do))
    sizes = _leading(query, key, value, enable_gqa, shapes)
    if attn_mask is not None:
        _validate_mask(attn_mask, query, key, sizes)


def _leading(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, shapes: str
) -> tuple[int, ...]:
    """The output's leading sizes."""
    rank = max(t.dim() for t in (query, key, value))
    rows = [(1,) * (rank - t.dim()) + tuple(t.shape[:-2]) for t in (query, key, value)]
    sizes = []
    for i, (q, k, v) in enumerate(zip(*rows, strict=True)):
        if q == k == v:
            sizes.append(q)
        elif enable_gqa and i == rank - 3:
            if not (k and v and q % k == 0 and q % v == 0):
                supported = "with enable_gqa: query heads that are a multiple of the others"
                raise UsageError(explain_bad("heads", shapes, supported, "change one of them"))
            sizes.append(q)
        else:
            others = {q, k, v} - {1}
            if len(others) > 1:
                supported = "equal sizes, sizes of 1, or more query heads with enable_gqa=True"
                raise UsageError(
                    explain_bad("leading dims", shapes, supported, "change one of them")
                )
            sizes.append(others.pop())
    return tuple(sizes)


def _validate_mask(mask: Tensor, query: Tensor, key: Tensor, leading: tuple[int, ...]) -> None:
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        name = str(query.dtype).removeprefix("torch.")
        supported = "bool, float32" if name == "float32" else f"bool, float32, {name}"
        got = str(mask.dtype).removeprefix("torch.")
        raise DTypeError(explain_bad("attn_mask dtype", got, supported, "cast it to one of these"))
    full = (*leading, query.shape[-2], key.shape[-2])
    own = tuple(mask.shape)
    fits = 2 <= mask.dim() <= len(full) and all(
        a in (1, b) for a, b in zip(reversed(own), reversed(full), strict=False)
    )
    if not fits:
        do = "reshape it, with sizes of 1 where it broadcasts"
        raise UsageError(explain_bad("attn_mask", own, f"what broadcasts to {full}", do))


def sdpa_only(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> str | None:
    """Why the operator gives a valid call to torch.sdpa whatever the table says; None if not.

    Empty tensors count as served: for them no kernel is asked at all.
    """
    ranks = {t.dim() for t in (query, key, value)}
    if ranks not in ({3}, {4}):
        return "a rank other than 3 and 4"
    heads = [t.shape[-3] for t in (query, key, value)]
    batches = {t.shape[0] for t in (query, key, value)} if ranks == {4} else {1}
    if len(batches) > 1 or heads[1] != heads[2] or (heads[0] != heads[1] and not enable_gqa):
        return "leading dims that broadcast"
    if attn_mask is not None and attn_mask.dim() > query.dim():
        return "attn_mask has more dims than query"
    if query.dtype not in _NAMES:
        return f"dtype {str(query.dtype).removeprefix('torch.')}"
    if attn_mask is not None and is_causal:
        return "attn_mask together with is_causal"
    if query.shape[-1] == 0 or any(
        t.stride(-1) != 1 and t.shape[-1] > 1 for t in (query, key, value)
    ):
        return "a head dim of size 0 or of a stride other than 1"
    return None


def problem_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    *,
    lower_right: bool = False,
) -> Problem:
    """The problem of a valid call, as the runtime's key sees it.

    Dim -3 is the heads, all dims before it are the batch. Where sizes of 1 broadcast, the problem
    is that of the expanded tensors. `lower_right`: where `is_causal` hangs on that corner.

    Raises:
        DTypeError: a dtype that no kernel but torch.sdpa has (f64).
    """
    name = _NAMES.get(query.dtype)
    if name is None:
        got = str(query.dtype).removeprefix("torch.")
        raise DTypeError(explain_bad("dtype", got, ", ".join(_NAMES.values()), "cast the tensors"))
    leading = _leading(query, key, value, enable_gqa, _shapes(query, key, value))
    heads_q = leading[-1] if leading else 1
    heads_kv = key.shape[-3] if enable_gqa and key.dim() > 2 else heads_q
    if attn_mask is not None:
        mask = "bool" if attn_mask.dtype == torch.bool else "additive"
    elif is_causal and lower_right and query.shape[-2] != key.shape[-2]:
        mask = "causal_lower_right"
    else:
        mask = "causal" if is_causal else "none"
    return Problem(
        name,
        math.prod(leading[:-1]),
        heads_q,
        heads_kv,
        query.shape[-2],
        key.shape[-2],
        query.shape[-1],
        value.shape[-1],
        mask,
        query.device.type,
    )


def make_inputs(
    problem: Problem, device: torch.device | str, seed: int, *, layout: str = "bhnd"
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of standard normal numbers, the same for the same seed and device.

    Shapes are (B, H, N, D) whatever the layout; `bnhd` is laid out in memory as (B, N, H, D), as a
    projection of (B, N, H * D) gives it.

    Raises:
        UsageError: an unknown layout.
    """
    if layout not in LAYOUTS:
        raise UsageError(explain_bad("layout", layout, ", ".join(LAYOUTS), "choose one of these"))
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    made = []
    for heads, length, head_dim in (
        (p.heads_q, p.seqlen_q, p.head_dim),
        (p.heads_kv, p.seqlen_k, p.head_dim),
        (p.heads_kv, p.seqlen_k, p.head_dim_v),
    ):
        shape = (p.batch, heads, length, head_dim)
        if layout == "bnhd":
            shape = (p.batch, length, heads, head_dim)
        # Drawn in f32 and rounded, so that all dtypes get the same numbers.
        tensor = torch.randn(shape, generator=generator, device=device).to(TORCH_DTYPES[p.dtype])
        made.append(tensor.transpose(1, 2) if layout == "bnhd" else tensor)
    return made[0], made[1], made[2]


def whole_rows(mask: Tensor | None, keys: int) -> Tensor | None:
    """A CUDA mask with every key of a row side by side, numbers in it from a multiple of 16 bytes
    on; what it repeats otherwise stays as it is.

    Of masks whose last dim is expanded or strided torch's efficient backend says that it must be
    contiguous; and cuDNN reads these, and numbers that begin or follow one another anyhow, at
    addresses that are no multiple of 4 bytes (2.11, an H200).
    """
    if mask is None or not mask.is_cuda or not mask.dim():
        return mask
    once = mask
    for dim in range(mask.dim() - 1):
        if mask.stride(dim) == 0:
            once = once.narrow(dim, 0, min(1, mask.shape[dim]))
    whole = mask.shape[-1] == keys and (keys == 1 or mask.stride(-1) == 1)
    if whole and (mask.dtype == torch.bool or not _lies_anyhow(once)):
        return mask
    return once.expand(*once.shape[:-1], keys).clone(memory_format=torch.contiguous_format)


def _lies_anyhow(mask: Tensor) -> bool:
    if (
        type(mask) not in (Tensor, torch.nn.Parameter)
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return False  # it has no address
    size = mask.element_size()
    aligned = all(stride * size % 16 == 0 for stride in mask.stride()[:-1])
    return mask.data_ptr() % 16 != 0 or not (aligned or mask.is_contiguous())


def positive(query: Tensor, scale: float | None) -> tuple[Tensor, float | None, float]:
    """Query and scale with the scale's sign in the query; what the query was multiplied by.

    torch masks before it scales: its causal rows are NaN with a scale of 0 or less (2.13 on CPU),
    and 0 with NaN. Scales that f32 does not hold in full are 0 to cuDNN, and NaN where they meet a
    hidden score (2.11).
    """
    smallest = 0.0 if query.dtype == torch.float64 else _TINY
    if scale is None or (scale > 0 and scale >= smallest):
        return query, scale, 1.0
    if scale < 0 and -scale >= smallest:
        return query * -1.0, -scale, -1.0
    factor = 0.0 if scale == scale else scale
    return query * factor, 1.0, factor
