"""What an architecture's name stands for in a build: never a reason to fail for the others."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from autofa.compiler.toolchain import cuda_archs, find, unsupported
from autofa.device import CUDA_ARCHS, Limits, cuda_limits, named_limits
from autofa.errors import ToolchainError, UsageError
from autofa.settings import Settings


@dataclass(frozen=True)
class Arch:
    """What is built for a name that was asked for.

    Attributes:
        limits: None where nothing can be.
        note: why nothing, or why something else than what was asked for; else empty.
    """

    limits: Limits | None
    note: str = ""


def _number(arch: str) -> int:
    return int(re.sub(r"[^0-9]", "", arch))


def resolve(name: str, settings: Settings) -> Arch:
    """The architecture, card or CPU level of that name, as far as today's nvcc can serve it.

    One that is newer than nvcc or autofa knows becomes PTX of the newest that both know. Where
    there is no nvcc, what is in the cache may still serve.

    Raises:
        UsageError: no such name.
    """
    if re.fullmatch(r"sm_[0-9]{2,3}[af]?", name) is None:
        return Arch(named_limits(name))
    try:
        nvcc = find("cuda", settings)
        known = {_number(arch) for arch in cuda_archs(nvcc, settings)}
        reason = unsupported(nvcc, name, settings)
        who = f"{nvcc.version} and this autofa know"
    except ToolchainError:
        known, reason, who = {_number(arch) for arch in CUDA_ARCHS}, None, "this autofa knows"
    both = known & {_number(arch) for arch in CUDA_ARCHS}
    if both and _number(name) > max(both):
        newest = max(both)
        limits = replace(cuda_limits(f"sm_{newest}"), arch=f"compute_{newest}")
        note = (
            f"{name} is newer than {who}: PTX of compute_{newest} is built for it, which the "
            "driver compiles when it is loaded"
        )
        return Arch(limits, note)
    if reason is not None:
        return Arch(None, reason)
    try:
        return Arch(cuda_limits(name))
    except UsageError as error:
        return Arch(None, str(error))
