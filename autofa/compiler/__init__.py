"""Compiles variants: one torch-free shared library per variant and target, cached by content."""

from __future__ import annotations

from autofa.compiler.build import Build, build
from autofa.compiler.cache import library_of, record_of, slugs_built
from autofa.compiler.diagnostics import Usage
from autofa.compiler.fingerprint import fingerprint
from autofa.compiler.jobs import default_jobs
from autofa.compiler.toolchain import Toolchain, cuda_archs, find

__all__ = [
    "Build",
    "Toolchain",
    "Usage",
    "build",
    "cuda_archs",
    "default_jobs",
    "find",
    "fingerprint",
    "library_of",
    "record_of",
    "slugs_built",
]
