"""Kernel families that fail in every way a candidate can, and an honest one beside them.

They are C++ for the CPU, so that the whole way from compiling to the database can be tried on any
machine. Sources are beside this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autofa.device import Limits
from autofa.kernels.family import Domain, KernelFamily
from autofa.kernels.registry import Registry
from autofa.kernels.vendor import VENDORS
from autofa.problem import Problem

ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Poison:
    """A family, the status it must get, and a word that its message must hold."""

    family: KernelFamily
    status: str
    message: str


def _no_parameters(problem: Problem, limits: Limits) -> dict[str, int | str]:
    return {}


def _family(folder: str, device: str = "cpu", threads: int = 0) -> KernelFamily:
    return KernelFamily(
        name=f"poison.{folder}",
        title=f"poison({folder})",
        version=1,
        folder=folder,
        entry="kernel.h" if device == "cpu" else "kernel.cuh",
        domain=Domain(device, ("f32",), masks=("none", "causal"), min_arch=3),
        params=(),
        target=lambda params, limits: limits.arch,
        default=_no_parameters,
        specialised=("dtype",),
        threads=lambda params, problem: threads,
        root=ROOT,
    )


HONEST = _family("honest")
CASES = (
    Poison(_family("broken"), "compile_error", "NoSuchFault"),
    Poison(_family("zeros"), "wrong_result", "got 0 instead of"),
    Poison(_family("skips_tail"), "wrong_result", "instead of"),
    Poison(_family("ignores_mask"), "wrong_result", "instead of"),
    Poison(_family("out_of_bounds"), "wrong_result", "wrote outside the output"),
    Poison(_family("segfault"), "crashed", "SIGSEGV"),
    Poison(_family("sigfpe"), "crashed", "SIGFPE"),
    Poison(_family("hangs"), "timeout", "within"),
    Poison(_family("hoards"), "out_of_memory", "memory"),
)
POISON: tuple[KernelFamily, ...] = tuple(case.family for case in CASES)
REGISTRY = Registry(families=(HONEST, *POISON), vendors=VENDORS)

CUDA_HONEST = _family("cuda_honest", "cuda", 64)
CUDA_CASES = (
    Poison(_family("cuda_unwritten", "cuda", 64), "wrong_result", "were not written"),
    Poison(_family("cuda_out_of_bounds", "cuda", 64), "wrong_result", "wrote outside the output"),
    Poison(_family("cuda_illegal", "cuda", 64), "crashed", "illegal"),
    Poison(_family("cuda_hangs", "cuda", 64), "timeout", "within"),
    Poison(_family("cuda_refused", "cuda", 2048), "launch_error", "CUDA error"),
)
CUDA_REGISTRY = Registry(
    families=(CUDA_HONEST, *(case.family for case in CUDA_CASES)), vendors=VENDORS
)
