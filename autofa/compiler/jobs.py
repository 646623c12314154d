"""How many compilers may run at once: by cores, and by the memory that is really free."""

from __future__ import annotations

import os
from pathlib import Path

from autofa.settings import Settings

_GIB = 1 << 30
# With margin: g++ 12 was measured to take 240 MiB for cpu.flash, nvcc 13.0 less than that for
# mma.split_q. What includes the CUDA headers' larger parts takes more.
_MEMORY_PER_JOB = {"cuda": _GIB, "cpu": _GIB // 2}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _cgroup_headroom(root: Path, membership: str) -> list[int]:
    """Bytes that each memory cgroup above this process still grants (version 2, then 1)."""
    found = []
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            folder, limit_name, used_name = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folder = root / "memory"
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        # Inside a container the path may be the host's: then only its end exists here.
        for depth in range(len(parts) + 1):
            place = folder.joinpath(*parts[:depth])
            limit, used = _number(place / limit_name), _number(place / used_name)
            if limit is not None:
                found.append(max(0, limit - (used or 0)))
    return found


def available_memory(
    meminfo: Path = Path("/proc/meminfo"),
    cgroups: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
) -> int | None:
    """Bytes that new processes can take, by the system and by cgroup limits; None if unknown."""
    bounds = []
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                bounds.append(int(line.split()[1]) * 1024)
        bounds += _cgroup_headroom(cgroups, membership.read_text())
    except (OSError, ValueError, IndexError):
        pass  # what was found so far still counts
    return min(bounds) if bounds else None


def default_jobs(settings: Settings, kind: str = "cuda") -> int:
    """Compilers to run at once: MAX_JOBS, else what cores and memory allow, at least 1."""
    if settings.max_jobs is not None:
        return settings.max_jobs
    cores = len(os.sched_getaffinity(0))
    memory = available_memory()
    if memory is None:
        return cores
    return max(1, min(cores, memory // _MEMORY_PER_JOB[kind]))
