"""Candidates as callables: bound to inputs as dispatch calls them, or writing into given memory.

A variant's library is also called directly, past the operator, because only then the memory it
writes to can be watched: the operator allocates its own.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch._C._nn import scaled_dot_product_attention  # F's own, whatever F holds now

from autofa.bench.inputs import Frame, Inputs
from autofa.bench.protocol import Subject
from autofa.errors import LaunchError
from autofa.kernels.vendor import BASELINE
from autofa.runtime import abi, extension, kernels


class ScratchError(LaunchError):
    """A kernel could not get the memory it needs."""


class OutsideError(Exception):
    """A kernel wrote outside the memory it was given."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's number of CPU threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Kernel:
    """One candidate.

    Attributes:
        bind: inputs -> a call without arguments, as cheap as dispatch's own.
        write: (inputs, out, lse or None): the variant's library itself, into that memory; raises
            LaunchError, ScratchError, OutsideError (its workspace). None for a vendor kernel.
    """

    slug: str
    bind: Callable[[Inputs], Callable[[], torch.Tensor]]
    write: Callable[[Inputs, torch.Tensor, torch.Tensor | None], None] | None = None
    deterministic: bool = False
    fast: bool = False


def plain_sdpa(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """torch's own function, untouched, called from Python: the baseline of every ratio."""
    return partial(
        scaled_dot_product_attention,
        inputs.query,
        inputs.key,
        inputs.value,
        **inputs.sdpa_arguments(),  # type: ignore[arg-type]
    )


def _bind_operator(kernel: int, inputs: Inputs) -> Callable[[], torch.Tensor]:
    return partial(
        torch.ops.autofa.run.default,
        kernel,
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.attn_mask,
        inputs.is_causal or inputs.lower_right,
        None,
        inputs.enable_gqa,
        inputs.lower_right,
    )


def load(subject: Subject) -> Kernel:
    """The candidate, loaded.

    Raises:
        LaunchError: its library, or the operator's, cannot be loaded.
    """
    if subject.slug == BASELINE:
        return Kernel(BASELINE, plain_sdpa)
    if subject.library is None:
        number = kernels.load_vendor(subject.slug)
        return Kernel(subject.slug, partial(_bind_operator, number), fast=subject.fast)
    number = extension.add_library(subject.library, subject.slug, subject.alignment)
    library = ctypes.CDLL(subject.library)
    library.autofa_launch.restype = ctypes.c_int32
    library.autofa_launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    library.autofa_workspace_bytes.restype = ctypes.c_int64
    library.autofa_workspace_bytes.argtypes = (ctypes.c_void_p,)
    return Kernel(
        subject.slug,
        partial(_bind_operator, number),
        partial(_launch, library, subject.slug),
        subject.deterministic,
        subject.fast,
    )


@lru_cache(maxsize=1)
def _parallel_for() -> int:
    """Address of libtorch's torch_parallel_for, which has the executor's signature."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    found = ctypes.cast(ctypes.CDLL(str(path)).torch_parallel_for, ctypes.c_void_p).value
    if found is None:
        raise LaunchError(f"{path}: torch_parallel_for is not there")
    return found


def _strides(tensor: torch.Tensor, count: int) -> tuple[int, ...]:
    """Of the first `count` dimensions, 0 where broadcast."""
    pairs = zip(tensor.shape[:count], tensor.stride()[:count], strict=True)
    return tuple(0 if size == 1 else stride for size, stride in pairs)


def make_params(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> abi.Params:
    """The C record of one call, without a workspace."""
    p = inputs.problem
    params = abi.Params()
    params.struct_bytes = ctypes.sizeof(abi.Params)
    params.dtype = abi.DTYPE_CODES[p.dtype]
    params.causal = abi.CAUSAL_CODES[p.mask if p.causal else "none"]
    params.mask = abi.MASK_CODES["none" if p.causal else p.mask]
    params.mask_dtype = params.dtype
    params.device_index = -1 if out.device.type == "cpu" else out.device.index
    params.q, params.k, params.v = (
        tensor.data_ptr() for tensor in (inputs.query, inputs.key, inputs.value)
    )
    params.out = out.data_ptr()
    params.lse = None if lse is None else lse.data_ptr()
    for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
        setattr(params, name, getattr(p, name))
    params.q_strides[:] = inputs.query.stride()[:3]
    params.k_strides[:] = inputs.key.stride()[:3]
    params.v_strides[:] = inputs.value.stride()[:3]
    params.out_strides[:] = out.stride()[:3]
    if inputs.attn_mask is not None:
        params.attn_mask = inputs.attn_mask.data_ptr()
        params.mask_strides[:] = _strides(inputs.attn_mask, 4)
    params.scale = 1.0 / math.sqrt(p.head_dim)
    return params


def _launch(
    library: ctypes.CDLL,
    slug: str,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    params = make_params(inputs, out, lse)
    scratch: Frame | None = None
    size = library.autofa_workspace_bytes(ctypes.byref(params))
    if size > 0:
        scratch = Frame((math.ceil(size / 4),), "flat", torch.float32, out.device)
        params.workspace = scratch.view.data_ptr()
    executor = abi.Executor(_parallel_for(), torch.get_num_threads(), 0)
    stream = None
    if out.device.type == "cuda":
        stream = torch.cuda.current_stream(out.device).cuda_stream
    code = library.autofa_launch(ctypes.byref(params), ctypes.byref(executor), stream)
    if out.device.type == "cuda":
        torch.cuda.synchronize(out.device)
    if code == abi.REFUSED:
        raise LaunchError(f"{slug} refuses what its declaration serves")
    if code == abi.NO_MEMORY:
        raise ScratchError(f"{slug} got no scratch memory")
    if code != abi.OK:
        raise LaunchError(f"{slug}: launch failed with CUDA error {code}")
    if scratch is not None:
        damage = scratch.damage()
        if damage is not None:
            raise OutsideError(f"wrote outside its workspace: {damage}")
