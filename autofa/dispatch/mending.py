"""Arguments that torch's own kernels answer wrongly, rewritten so that they answer rightly.

csrc/runtime does the same for calls that the operator hands to them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from autofa.dispatch.fake import output_sizes
from autofa.runtime.tensors import whole_rows

_functorch = torch._C._functorch.peek_interpreter_stack
_is_batched_by_engine = torch._C._functorch.is_legacy_batchedtensor
_choice = torch._fused_sdp_choice
_CUDNN = int(SDPBackend.CUDNN_ATTENTION.value)


def _apart(tensor: Tensor) -> Tensor:
    """Rows that do not share memory; a copy where they did."""
    width = tensor.shape[-1]
    if width > 1 and tensor.stride(-1) != 1:
        return tensor
    for dim in range(tensor.dim() - 1):
        stride = tensor.stride(dim)
        expanded = stride == 0 and dim != tensor.dim() - 2
        if tensor.shape[dim] > 1 and stride < width and not expanded:
            return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def off_grid(tensor: Tensor) -> bool:
    """Whether a CUDA tensor starts, or a row of it, at no multiple of 16 bytes where a copy would.

    torch's fused CUDA kernels do not ask: with 2.11 on an H200 cuDNN gave values that were off by
    more than 1, and the efficient backend raised, for the strides of sizes of 1 too, or left the
    device in an error.
    """
    if (
        not tensor.is_cuda
        or type(tensor) not in (Tensor, torch.nn.Parameter)
        or torch.compiler.is_compiling()
        or _functorch() is not None
        or _is_batched_by_engine(tensor)  # it has no address
    ):
        return False
    size = tensor.element_size()
    rows_fit = tensor.shape[-1] * size % 16 == 0
    return tensor.data_ptr() % 16 != 0 or (
        rows_fit and tensor.stride(-1) == 1 and any(s * size % 16 for s in tensor.stride()[:-1])
    )


def on_grid(tensor: Tensor) -> Tensor:
    """A copy of what is `off_grid`."""
    if off_grid(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def ordinary(tensor: Tensor) -> bool:
    """Whether `mended` has nothing to do with this tensor, found out in 0.3 us; False where that
    takes longer."""
    if tensor.is_contiguous():
        return not tensor.is_cuda or (_functorch() is None and not off_grid(tensor))
    if tensor.dim() != 4 or (tensor.is_cuda and _functorch() is not None):
        return False
    batch, head, row, last = tensor.stride()
    width = tensor.shape[3]
    if last != 1 or batch < width or head < width or row < width:
        return False
    if not tensor.is_cuda:
        return True
    bits = (batch | head | row) * tensor.element_size() | tensor.data_ptr()
    return bits % 16 == 0


def _cast(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast without what an expanded mask repeats."""
    once = mask
    for dim in range(mask.dim()):
        if mask.stride(dim) == 0:
            once = once.narrow(dim, 0, min(1, mask.shape[dim]))
    return once.to(dtype).expand(mask.shape)


def mended(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The same call in a form that torch serves rightly. What it does else was seen with 2.13:

    Matrices whose rows begin within one another are none to BLAS: on CPU, queries with overlapping
    rows, and in bf16 a key expanded along the length, gave other values. A mask in f32 is read as
    f64 where the query is f64, past its end. A mask with dims that only the value has raises, and
    empty results have the query's dims instead of the broadcast ones. On CUDA (2.11, an H200) a
    mask in f32 with a query of 16 bits gave NaN; see also `off_grid`, `whole_rows`, `rows_to_keep`.
    """
    query, key, value = on_grid(query), on_grid(key), on_grid(value)
    if query.is_cuda and not query.shape[-1] and not key.shape[-1]:
        # torch's cuDNN backend returns None for a head dim of 0 (2.11); its scores are zeros.
        query, key = (torch.nn.functional.pad(tensor, (0, 8)) for tensor in (query, key))
    if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
        query, key, value = _apart(query), _apart(key), _apart(value)
    attn_mask = whole_rows(attn_mask, key.shape[-2])
    if (
        attn_mask is not None
        and attn_mask.dtype == torch.float32
        and (query.dtype == torch.float64 or (query.is_cuda and query.dtype != torch.float32))
    ):
        attn_mask = _cast(attn_mask, query.dtype)
    if (
        not (query.shape[:-2] == key.shape[:-2] == value.shape[:-2])
        and not enable_gqa
        and (attn_mask is not None or not (query.numel() and key.numel() and value.numel()))
    ):
        *lead, _, _ = output_sizes(query, key, value, enable_gqa)
        query = query.expand(*lead, *query.shape[-2:])
    return query, key, value, attn_mask


def blind_rows(query: Tensor, key: Tensor) -> int:
    """How many of the first rows see no key of a lower-right triangle, where torch's CUDA kernels
    give them a mean of the values, and the rows after them what upper rows see (2.11, an H200)."""
    return max(0, query.shape[-2] - key.shape[-2]) if query.is_cuda else 0


def rows_to_keep(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> Tensor | None:
    """True, (..., Nq, 1), for rows that see a key, where SDPA would leave rows that see none to
    cuDNN, which gives them a mean of the values (torch 2.11, an H200); else None."""
    if mask is None or not query.is_cuda:
        return None
    real = type(query) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    # Autocast changes what SDPA is asked.
    if real and _functorch() is None and not torch.is_autocast_enabled("cuda"):
        choice = _choice(query, key, value, mask, 0.0, False, scale=None, enable_gqa=enable_gqa)
        if choice != _CUDNN:
            return None
    return (mask if mask.dtype == torch.bool else mask != -math.inf).any(-1, keepdim=True)


def sees_nothing(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether there are no keys, or no element to give."""
    return not key.shape[-2] or 0 in output_sizes(query, key, value, enable_gqa)


def nothing_seen(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> Tensor:
    """What such a call returns: zeros, with gradients of zero.

    torch's own backward ends in an internal error for tensors without heads (2.11 on CUDA).
    """
    out = query.new_zeros(output_sizes(query, key, value, enable_gqa))
    for tensor in (query, key, value):
        out = out + tensor[..., :0].sum()
    return out
