"""Build targets (`sm_90a`, `compute_120` for PTX, `x86-64-v4`) and the flags that decide the code
made for each."""

from __future__ import annotations

import re

from autofa.errors import UsageError, explain_bad

_CUDA = re.compile(r"sm_([0-9]{2,3})([af]?)")
# Code for no architecture in particular, which the driver compiles when it is loaded.
_PTX = re.compile(r"compute_([0-9]{2,3})")
_CPU = re.compile(r"x86-64-v[34]")

# No fast-math: infinities are the masks, and a NaN in the input must come out. What is switched off
# here only frees the compiler from errno, trapping and the sign of zero.
_CPU_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fno-exceptions",
    "-fno-rtti",
)
_CUDA_FLAGS = ("-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden")


def kind_of(target: str) -> str:
    """`cuda` (compiled by nvcc) or `cpu` (compiled by the C++ compiler).

    Raises:
        UsageError: no target has that name.
    """
    if _CUDA.fullmatch(target) or _PTX.fullmatch(target):
        return "cuda"
    if _CPU.fullmatch(target):
        return "cpu"
    supported = "sm_NN, sm_NNa, compute_NN, x86-64-v3, x86-64-v4"
    raise UsageError(explain_bad("build target", target, supported, "name one of these"))


def compute_arch(target: str) -> str:
    """The virtual architecture of a CUDA target: `sm_90a` -> `compute_90a`; PTX is its own."""
    return target.replace("sm_", "compute_")


def flags_of(target: str) -> tuple[str, ...]:
    """The flags that decide the machine code: part of a library's fingerprint. No paths."""
    if kind_of(target) == "cuda":
        return (*_CUDA_FLAGS, f"-gencode=arch={compute_arch(target)},code={target}")
    return (*_CPU_FLAGS, f"-march={target}")


def source_suffix(target: str) -> str:
    return ".cu" if kind_of(target) == "cuda" else ".cpp"
