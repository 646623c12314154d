"""Candidates as kernel ids of the runtime, and a call that forces one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from autofa.errors import LaunchError
from autofa.kernels import Candidate
from autofa.kernels.vendor import VendorKernel
from autofa.problem import EXPLICIT_MASKS, Problem
from autofa.runtime import extension, vendors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SDPA = 0


def load(candidate: Candidate, library: Path | None) -> int:
    """The kernel id of a candidate. A library is loaded once per process; thread-safe.

    Raises:
        LaunchError: a variant without a library, or one that cannot be loaded, speaks another ABI
            or is another variant; a vendor kernel that the runtime does not know, or whose library
            cannot be used.
    """
    if isinstance(candidate, VendorKernel):
        return load_vendor(candidate.slug)
    if library is None:
        raise LaunchError(f"{candidate.slug}: not compiled; build it first")
    alignment = candidate.family.domain.alignment
    return extension.add_library(str(library), candidate.slug, alignment)


def load_vendor(slug: str) -> int:
    """The kernel id of a vendor kernel. Imports its library, where it has one beside torch.

    Raises:
        LaunchError: the runtime does not know it, or its library cannot be used.
    """
    vendors.load(slug)
    return extension.add_vendor(slug)


def run(
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
    """Attention by this kernel and no other.

    Arguments as of `scaled_dot_product_attention`; with `lower_right`, `is_causal` hangs on the
    lower-right corner. The output's strides follow the query's, whatever the kernel.

    Raises:
        RuntimeError: it cannot serve this call, or the arguments are invalid.
    """
    import torch

    result: Tensor = torch.ops.autofa.run.default(
        kernel, query, key, value, attn_mask, is_causal, scale, enable_gqa, lower_right
    )
    return result


def launch_once(kernel: int, problem: Problem, device: torch.device) -> None:
    """Calls a kernel on a CUDA device with made-up tensors, before it may be captured; where it
    refuses the call, SDPA.

    A first launch loads the kernel onto the device; other libraries, SDPA's cuDNN among them, also
    compile for the very shape. Where memory is short for that, nothing happens.

    Raises:
        RuntimeError: CUDA serves no call any more.
    """
    import torch

    from autofa.runtime.tensors import TORCH_DTYPES, make_inputs

    if device.type != "cuda":
        return
    causal, lower_right = problem.mask.startswith("causal"), problem.mask == "causal_lower_right"
    grouped, mask = problem.heads_q != problem.heads_kv, None
    try:
        if problem.mask in EXPLICIT_MASKS:
            kind = torch.bool if problem.mask == "bool" else TORCH_DTYPES[problem.dtype]
            mask = torch.ones(problem.seqlen_q, problem.seqlen_k, dtype=kind, device=device)
        run(kernel, *make_inputs(problem, device, 0), mask, causal, None, grouped, lower_right)
    except torch.OutOfMemoryError:
        return
    except RuntimeError:
        if kernel == SDPA:
            raise
        launch_once(SDPA, problem, device)


def run_with_lse(
    kernel: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    lower_right: bool,
) -> tuple[Tensor, Tensor]:
    """As `run`, with the log-sum-exp: natural, f32, the output's shape without its last dim, -inf
    on rows that see no key.

    Raises:
        RuntimeError: the kernel cannot serve this call, or gives no log-sum-exp.
    """
    result: tuple[Tensor, Tensor] = _raw_run_with_lse()(
        kernel, query, key, value, attn_mask, is_causal, scale, enable_gqa, lower_right
    )
    return result


@cache
def _raw_run_with_lse() -> Callable[..., tuple[Tensor, Tensor]]:
    """The operator as a raw callable: OpOverload.__call__ costs 0.25 us more."""
    import torch

    raw: Callable[..., tuple[Tensor, Tensor]] = torch.ops.autofa.run_with_lse.default._op
    return raw
