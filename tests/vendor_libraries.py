"""Stand-ins for attention libraries that are not here, found as if pip had installed them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from autofa.kernels import REGISTRY, vendor
from autofa.kernels.vendor import VENDORS, VendorKernel
from autofa.runtime import vendors

STAND_INS = Path(__file__).parent / "stand_ins"
VERSIONS = {
    "flash-attn": "2.8.3",
    "flash_attn_3": "3.0.0",
    "fa3-fwd": "0.0.3",
    "flash-attn-4": "4.0.0b36",
    "ffpa-attn": "0.2.4",
}
LIBRARY_KERNELS = tuple(v for v in REGISTRY.vendors if v not in VENDORS)


def write_distribution(folder: Path, name: str, version: str) -> None:
    """The metadata that pip leaves; takes the place of another version's."""
    for old in folder.glob(f"{name.replace('-', '_')}-*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    reset_versions()


def reset_versions() -> None:
    """Versions are read anew."""
    vendor._installed.cache_clear()


def _on_cpu(kernel: VendorKernel) -> VendorKernel:
    domains = (replace(d, device="cpu", min_arch=0, max_arch=10**6) for d in kernel.domains)
    return replace(kernel, domains=tuple(domains))


@contextmanager
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All libraries are there, and serve the CPU in place of CUDA."""
    for name, version in VERSIONS.items():
        write_distribution(folder, name, version)
    before = {kernel.slug: kernel.domains for kernel in LIBRARY_KERNELS}
    with monkeypatch.context() as patch:
        for path in (folder, STAND_INS):
            patch.syspath_prepend(path)
        # For the worker, which is a process of its own.
        paths = (str(folder), str(STAND_INS), os.environ.get("PYTHONPATH", ""))
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setattr(vendors, "KEYS", ("CPU",))
        for kernel in LIBRARY_KERNELS:
            object.__setattr__(kernel, "domains", _on_cpu(kernel).domains)
        try:
            yield
        finally:
            reset_versions()
            for kernel in LIBRARY_KERNELS:
                object.__setattr__(kernel, "domains", before[kernel.slug])
            sys.path_importer_cache.pop(str(folder), None)
