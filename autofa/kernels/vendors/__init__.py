"""Kernels that other Python libraries bring, one file per library, which lists them in `KERNELS`.

None of the libraries is needed, and none is imported here: what is installed is read from the
metadata of its distribution. How each is called is known to `autofa.runtime.vendors`.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from autofa.kernels.vendor import VendorKernel


def declared() -> tuple[VendorKernel, ...]:
    """The kernels of every file of this folder, by file name: a new file is a new library."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = (import_module(f"{__name__}.{name}") for name in names)
    return tuple(kernel for module in modules for kernel in module.KERNELS)
