"""The usual calls of `attention` as one C function (csrc/runtime/python_face.h), where it serves.

It reads tensors at the place where this torch keeps them in Python's objects. That is found out
here, and believed only where every probe agrees with what torch says of itself.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._nn import scaled_dot_product_attention as sdpa
from torch.autograd import forward_ad

from autofa import resources

Face = Callable[..., Any]

_library: ctypes.PyDLL | None = None


def nobody(*_: object) -> None:
    """Serves no call."""


def _payload() -> int | None:
    """At which byte of a tensor object the pointer to torch's own tensor is."""
    head = object.__basicsize__
    # The first field, in torch 2.13; elsewhere it may be behind other things, and Python serves.
    probes = [torch.zeros(1), torch.zeros(2, 3, dtype=torch.float16), torch.zeros(0)]
    found = all(
        ctypes.c_size_t.from_address(id(probe) + head).value == probe._cdata for probe in probes
    )
    return head if found else None


def _adopter() -> Callable[..., Tensor] | None:
    """What makes Python's tensor of one in C, which it leaves as it is; None where this torch's
    takes it over, contrary to 2.13, or does not say."""
    try:
        aoti = torch._C._aoti
        give: Callable[..., Any] = aoti.unsafe_alloc_void_ptr_from_tensor
        adopt: Callable[..., Tensor] = aoti.alloc_tensor_by_stealing_from_void_ptr
        probe = torch.zeros(1)
        count: Callable[[], int] = probe._use_count  # type: ignore[attr-defined]
        before = count()
        found = adopt(give(probe))  # keeps these four bytes for good
        return adopt if found is probe and count() == before + 1 else None
    except (AttributeError, RuntimeError, TypeError):
        return None


def open_face(fwd: Face, restride: Face) -> Face:
    """The function: (query, key, value, dropout_p, is_causal, scale, enable_gqa) -> the output, or
    None where `attention` has to look closer. The runtime library must be loaded."""
    global _library
    # Builds without a global lock have a t there. sysconfig says the same, in 1.6 ms.
    if sys.implementation.name != "cpython" or "t" in sys.abiflags:
        return nobody
    if Tensor.__basicsize__ < object.__basicsize__ + ctypes.sizeof(ctypes.c_void_p):
        return nobody
    payload = _payload()
    if payload is None:
        return nobody
    library = ctypes.PyDLL(str(resources.runtime_library()))
    one, number = ctypes.py_object, ctypes.c_int32
    library.autofa_face_open.argtypes = (one, ctypes.c_int64)
    library.autofa_face_open.restype = ctypes.c_void_p
    library.autofa_face_watch.restype = library.autofa_face_forget.restype = None
    library.autofa_face_remember.argtypes = (one, one, one, number, number, number, number)
    library.autofa_face_remember.restype = None
    library.autofa_face_remember_query.argtypes = (one,)
    library.autofa_face_remember_query.restype = None
    objects = (
        Tensor,
        float,
        sdpa,
        fwd,
        restride,
        torch._C._is_any_autocast_enabled,
        torch._C._is_torch_function_mode_enabled,
        torch._C._functorch.peek_interpreter_stack,
        torch._C._get_tracing_state,
        torch._C._get_deterministic_algorithms,
        forward_ad,
        "_current_level",
        "requires_grad",
        "is_nested",
        _adopter(),
        Tensor.is_neg,
        torch._C._len_torch_dispatch_stack,
        torch._C._autograd._profiler_enabled,
        ("enable_gqa",),
        ("scale",),
        ("scale", "enable_gqa"),
    )
    address = library.autofa_face_open(objects, payload)
    if not address:
        return nobody
    face: Face = ctypes.cast(address, one).value
    _library = library
    return face


def watch() -> None:
    """Plain SDPA has won something: the function serves only what it was told of."""
    if _library is not None:
        _library.autofa_face_watch()


def forget() -> None:
    """Whatever the function was told is void."""
    if _library is not None:
        _library.autofa_face_forget()


def remember(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    enable_gqa: bool,
    *,
    trains: bool,
    sdpa_wins: bool,
) -> None:
    """Who serves such calls without a mask."""
    if _library is not None:
        _library.autofa_face_remember(query, key, value, is_causal, enable_gqa, trains, sdpa_wins)


def remember_query(query: Tensor) -> None:
    """That the operator serves every call with such a query."""
    if _library is not None:
        _library.autofa_face_remember_query(query)
