"""`DeviceKey`, what measurements are keyed by; `Limits`, what a kernel may use there. No torch."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from autofa.errors import UsageError, explain_bad


@dataclass(frozen=True, order=True)
class DeviceKey:
    """The exact identity of a device: never an ordinal, a prefix or a pattern.

    Attributes:
        kind: `cuda` or `cpu`.
        name: the GPU's full name, a MIG slice's included; the CPU's model name.
        arch: `sm_90` (compute capability), or the ISA, e.g. `x86-64-v4+amx_bf16`.
        units: SMs of a GPU, threads that torch uses on a CPU.
        memory_gib: GPU memory rounded to GiB; 0 on CPU.
    """

    kind: str
    name: str
    arch: str
    units: int
    memory_gib: int = 0

    def __str__(self) -> str:
        unit = "SMs" if self.kind == "cuda" else "threads"
        return f"{self.name} ({self.arch}, {self.units} {unit})"


@dataclass(frozen=True)
class Limits:
    """What one device lets a kernel use. Constraints prune by it.

    Attributes:
        kind: `cuda` or `cpu`.
        arch: build target: `sm_90a`, `compute_121` (PTX, for a newer GPU), or `x86-64-v4`.
        capability: 10 * major + minor of a GPU (90), the x86-64 level of a CPU (4), 0 unknown.
        smem_per_block: bytes of dynamic shared memory one block may opt in to; 0 on CPU.
        smem_per_sm: bytes of shared memory of one SM; 0 on CPU.
        regs_per_sm: 32-bit registers of one SM; 0 on CPU.
        units: SMs, or threads.
        features: CPU features beyond the level, e.g. `amx_bf16`.
    """

    kind: str
    arch: str
    capability: int
    smem_per_block: int = 0
    smem_per_sm: int = 0
    regs_per_sm: int = 0
    units: int = 1
    features: frozenset[str] = frozenset()


# Shared memory per SM and per block (bytes): CUDA C++ Programming Guide, "Technical Specifications
# per Compute Capability".
_SMEM_KIB = {
    70: (96, 96),
    75: (64, 64),
    80: (164, 163),
    86: (100, 99),
    87: (164, 163),
    88: (100, 99),
    89: (100, 99),
    90: (228, 227),
    100: (228, 227),
    103: (228, 227),
    110: (228, 227),
    120: (100, 99),
    121: (100, 99),
}
# Architectures whose own instructions need the suffix "a".
_ARCH_SPECIFIC = (90, 100, 103, 110, 120, 121)
CUDA_ARCHS = tuple(f"sm_{c}{'a' if c in _ARCH_SPECIFIC else ''}" for c in _SMEM_KIB)

# Customary names of cards, for asking what would be legal on a card that is not here.
CARDS = {
    "V100": "sm_70",
    "T4": "sm_75",
    "A100": "sm_80",
    "A10": "sm_86",
    "RTX 3080": "sm_86",
    "RTX 3090": "sm_86",
    "L4": "sm_89",
    "L20": "sm_89",
    "L40": "sm_89",
    "RTX 4090": "sm_89",
    "H100": "sm_90a",
    "H200": "sm_90a",
    "B200": "sm_100a",
    "RTX 5090": "sm_120a",
}


def cuda_limits(arch: str, units: int = 1) -> Limits:
    """The limits of a CUDA architecture such as `sm_80` or `sm_90a`.

    Raises:
        UsageError: the architecture is unknown.
    """
    match = re.fullmatch(r"sm_([0-9]{2,3})([af]?)", arch)
    capability = int(match.group(1)) if match else 0
    if capability not in _SMEM_KIB:
        known = ", ".join(CUDA_ARCHS)
        raise UsageError(explain_bad("arch", arch, known, "name one of these"))
    per_sm, per_block = _SMEM_KIB[capability]
    return Limits("cuda", arch, capability, per_block * 1024, per_sm * 1024, 65536, units)


def capability_limits(capability: int, units: int = 1) -> Limits:
    """The limits of a GPU by its compute capability. One newer than all that are known here is
    taken for the newest of these, and gets PTX of it.

    Raises:
        UsageError: it is older, or a number in between that no GPU has.
    """
    newest = max(_SMEM_KIB)
    if capability > newest:
        return replace(cuda_limits(f"sm_{newest}", units), arch=f"compute_{newest}")
    return cuda_limits(cuda_build_arch(capability), units)


def named_limits(name: str) -> Limits:
    """The limits of a card (`H200`, `RTX 4090`), an architecture (`sm_86`) or a CPU level
    (`x86-64-v3`).

    Raises:
        UsageError: the name is none of these.
    """
    cards = {card.lower(): arch for card, arch in CARDS.items()}
    wanted = name.strip()
    bare = wanted.lower().removeprefix("nvidia ").removeprefix("geforce ")
    if bare in cards:
        return cuda_limits(cards[bare])
    if wanted in ("x86-64-v3", "x86-64-v4"):
        return Limits("cpu", wanted, int(wanted[-1]))
    if wanted.startswith("sm_"):
        return cuda_limits(wanted)
    known = ", ".join((*CARDS, "sm_80 ...", "x86-64-v3", "x86-64-v4"))
    raise UsageError(explain_bad("limits", name, known, "name one of these"))


def cuda_build_arch(capability: int) -> str:
    """The build target for a GPU's compute capability (90 -> `sm_90a`)."""
    return f"sm_{capability}{'a' if capability in _ARCH_SPECIFIC else ''}"


_V3 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_CPU_EXTRAS = ("amx_bf16", "amx_tile", "avx512_bf16", "avx512_fp16")


@dataclass(frozen=True)
class CpuInfo:
    """Model name, x86-64 level (0 where it is not x86-64 or below v3) and extra features."""

    name: str
    level: int
    features: frozenset[str]


def parse_cpuinfo(text: str, machine: str) -> CpuInfo:
    """Reads the content of /proc/cpuinfo. Total: what is missing becomes unknown."""
    fields = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in reversed(text.splitlines()))
        if value
    }
    flags = frozenset(fields.get("flags", "").split())
    level = 0
    if machine in ("x86_64", "AMD64"):
        level = 4 if flags >= _V4 else 3 if flags >= _V3 else 0
    name = " ".join(fields.get("model name", machine or "unknown CPU").split())
    return CpuInfo(name, level, frozenset(f for f in _CPU_EXTRAS if f in flags))


@lru_cache(maxsize=1)
def cpu_info() -> CpuInfo:
    """What this machine's CPU is."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    return parse_cpuinfo(text, platform.machine())


def cpu_key(threads: int, info: CpuInfo | None = None) -> DeviceKey:
    """The key of this machine's CPU when torch uses `threads` threads."""
    info = info or cpu_info()
    base = f"x86-64-v{info.level}" if info.level else platform.machine() or "unknown"
    extras = "+amx_bf16" if "amx_bf16" in info.features else ""
    return DeviceKey("cpu", info.name, base + extras, threads)


def cpu_limits(threads: int | None = None, info: CpuInfo | None = None) -> Limits:
    """What this machine's CPU lets a kernel use."""
    info = info or cpu_info()
    units = threads or len(os.sched_getaffinity(0))
    arch = f"x86-64-v{info.level}" if info.level else "none"
    return Limits("cpu", arch, info.level, units=units, features=info.features)


def limits_of(key: DeviceKey) -> Limits:
    """The limits that a stored key implies.

    Raises:
        UsageError: a CUDA architecture older than this version knows.
    """
    if key.kind == "cuda":
        capability = int(re.sub(r"[^0-9]", "", key.arch) or 0)
        return capability_limits(capability, key.units)
    base, *extras = key.arch.split("+")
    match = re.fullmatch(r"x86-64-v([34])", base)
    level = int(match.group(1)) if match else 0
    return Limits("cpu", base, level, units=key.units, features=frozenset(extras))
