"""The cache of compiled kernels, and those that came with the package: what would not be loaded."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from autofa.compiler import cache
from autofa.device import cpu_limits
from autofa.diagnosis.finding import Finding, info, ok, problem
from autofa.resources import native_dir
from autofa.settings import Settings, cache_dir

# A library takes 0.1 to 2 MB, a compilation that much again and more; below this they fail oddly.
LEAST_FREE = 64 << 20
# Whole libraries are read: what a large cache on a slow disk leaves unread is said.
READ_SECONDS = 10.0
_ELSEWHERE = "set AUTOFA_CACHE_DIR to a folder of your own"


def cache_findings(settings: Settings, needed: str) -> Iterator[Finding]:
    """The cache.

    Args:
        needed: why something must be compiled; empty where a cache that cannot be written does.
    """
    root = cache_dir(settings).absolute()
    there = root
    while not there.exists():
        there = there.parent
    if there != root and there.is_dir():
        yield info("cache", f"{root}: not there yet; the first compilation makes it")
    elif not there.is_dir():
        yield problem("cache", f"{root}: {there} is no folder", _ELSEWHERE)
        return
    if not os.access(there, os.W_OK | os.X_OK):
        level = "problem" if needed else "info"
        why = needed or "nothing has to be compiled now"
        yield Finding("cache", level, f"{there} cannot be written ({why})", _ELSEWHERE)
    yield from _disk(there)
    yield from _contents(root)


def _disk(place: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(place).free
    told = f"{place}: {free / 2**20:.0f} MiB are free"
    if free < LEAST_FREE:
        yield problem("cache", told, f"free the disk, or {_ELSEWHERE}")
    elif os.statvfs(place).f_files and not os.statvfs(place).f_favail:
        yield problem("cache", f"{place}: no file can be added", f"free inodes, or {_ELSEWHERE}")
    else:
        yield ok("cache", told)
    if os.statvfs(place).f_flag & os.ST_NOEXEC:
        yield problem(
            "cache",
            f"{place} is mounted noexec: no compiled kernel can be loaded from there",
            "set AUTOFA_CACHE_DIR to a folder on another file system",
        )


def _contents(root: Path) -> Iterator[Finding]:
    libraries = sorted((root / "variants").glob("*/*.so"))
    for folder in sorted({library.parent for library in libraries}):
        reason = cache.distrust(folder)
        if reason is not None:
            cure = f"`chown -R $USER {folder}; chmod 700 {folder}`, if its content is yours"
            yield problem("cache", f"{folder} is not used: {reason}", cure)
    yield from _soundness("cache", libraries, f"{root}: ")


def prebuilt_findings() -> Iterator[Finding]:
    """What setup.py compiled for this CPU."""
    limits = cpu_limits()
    if not limits.capability:
        yield info("kernels", "this CPU has no AVX2: own kernels do not run on it, SDPA answers")
        return
    folder = native_dir() / "variants" / limits.arch
    yield from _soundness("kernels", sorted(folder.glob("*.so")), "prebuilt for this CPU: ")


def _soundness(area: str, libraries: list[Path], where: str) -> Iterator[Finding]:
    """Reads every library, as long as there is time, as it is read before it is loaded."""
    bad: list[str] = []
    seen = 0
    end = time.monotonic() + READ_SECONDS
    for library in libraries:
        if time.monotonic() > end:
            break
        seen += 1
        reason = _defect(library)
        if reason is not None and reason != cache.NO_CHECKSUM:
            bad.append(f"{library.name}: {reason}")
    size = sum(library.lstat().st_size for library in libraries) / 2**20
    told = f"{where}{len(libraries)} compiled kernels, {size:.0f} MiB"
    if seen < len(libraries):
        told += f"; {seen} of them looked at"
    yield ok(area, told)
    if bad:
        cure = "`autofa.warmup()` or the next tune compiles them again; deleting them does no harm"
        if area != "cache":
            cure = "install autofa again"
        yield problem(area, f"{where}{len(bad)} are damaged and not loaded; {bad[0]}", cure)


def _defect(library: Path) -> str | None:
    """Why it would not be loaded, as far as that can be known without loading it."""
    try:
        reason = cache.damage(library) or cache.distrust(library)
        if reason is not None:
            return reason
        # What the loader does first. A mount may refuse it without being called noexec.
        with library.open("rb") as file:
            mmap.mmap(
                file.fileno(), 1, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC
            ).close()
    except OSError as error:
        return str(error.strerror)
    return None
