"""The declarations of our own families, one per file, which names it `FAMILY`."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from autofa.kernels.family import KernelFamily


def declared() -> tuple[KernelFamily, ...]:
    """The family of every file of this folder, by file name: a new file is a new family."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = (import_module(f"{__name__}.{name}") for name in names)
    return tuple(module.FAMILY for module in modules)
