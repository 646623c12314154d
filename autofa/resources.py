"""The only locator of files that ship beside the Python code: `csrc/`, `db/`, built libraries."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


@cache
def _shipped(name: str) -> Path:
    # A checkout has the folder beside the package; an installed wheel carries a copy inside it.
    checkout = _PACKAGE.parent / name
    if (_PACKAGE.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    return _PACKAGE / "_resources" / name


def csrc_dir() -> Path:
    """The C++ and CUDA sources."""
    return _shipped("csrc")


def db_dir() -> Path:
    """The migrations and the seed measurements."""
    return _shipped("db")


def native_dir() -> Path:
    """What setup.py compiled: the runtime operator, and `variants/` with the baseline kernels."""
    return _PACKAGE / "_native"


def runtime_library() -> Path:
    """The torch operator. May be absent, where the package was copied without being built."""
    return native_dir() / "autofa_runtime.so"
