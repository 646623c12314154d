"""What the compiler tests share: requests of the tiny family, and a look at running processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from autofa.kernels.family import KernelFamily, Variant
from autofa.problem import parse_shape

TARGET = "x86-64-v3"
PROBLEM = parse_shape("1,8,128,64", dtype="f32", device="cpu")


def variant_of(family: KernelFamily, factor: int = 3) -> Variant:
    return family.variant({"factor": factor}, PROBLEM)


def requests_of(family: KernelFamily, *factors: int) -> list[tuple[Variant, str]]:
    return [(variant_of(family, factor), TARGET) for factor in factors]


def calls(tmp_path: Path) -> int:
    log = tmp_path / "calls"
    return len(log.read_text().splitlines()) if log.exists() else 0


def processes_naming(text: str) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in place.read_text(errors="replace"):
                found.append(int(place.parent.name))
        except OSError:
            continue
    return found


def until(condition: Callable[[], object], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
