"""How much memory there is, how much a measurement needs, and whether the system ran out of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from autofa.compiler import jobs
from autofa.device import DeviceKey
from autofa.problem import DTYPE_BYTES, EXPLICIT_MASKS, Problem

# Of what is available, what a worker may hold.
SHARE = 0.8
_GIB = 2**30


def available_memory() -> int:
    """Bytes of host memory that can be had now, the control group's limit included."""
    found = jobs.available_memory()
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if found is None else found


def oom_kills() -> int | None:
    """How many processes the system has killed for want of memory, those that a control group's
    limit killed included; None where it does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/vmstat").read_text().split("\noom_kill ")[1].split()[0])
    return None


def needed_bytes(problem: Problem) -> int:
    """The least that measuring `problem` holds at once: its inputs, and two outputs to compare."""
    p = problem
    output = p.batch * p.heads_q * p.seqlen_q * p.head_dim_v * DTYPE_BYTES[p.dtype]
    # Explicit masks are drawn in f32.
    mask = p.batch * p.seqlen_q * p.seqlen_k * 4 if p.mask in EXPLICIT_MASKS else 0
    return p.bytes + output + mask


def refusal(problem: Problem, device: DeviceKey) -> str | None:
    """Why `problem` cannot be measured on `device` for want of memory; None if it may fit."""
    if device.kind == "cuda":
        there, what = device.memory_gib * _GIB, f"the memory of {device.name}"
    else:
        there, what = int(available_memory() * SHARE), f"{SHARE:.0%} of the memory free now"
    needed = needed_bytes(problem)
    if needed <= there:
        return None
    p = problem
    return (
        f"shape {p.shape} {p.dtype} {p.mask}: got one whose tensors take at least "
        f"{needed / _GIB:.1f} GiB; supported: {there / _GIB:.1f} GiB ({what}); choose smaller sizes"
    )
