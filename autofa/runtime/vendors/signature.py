"""Whether a library's inner function is still the one that an adapter was written for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable


def require_parameters(function: Callable[..., object], names: Iterable[str]) -> None:
    """Raises:
    ImportError: a parameter of these names is missing.
    """
    missing = [name for name in names if name not in inspect.signature(function).parameters]
    if missing:
        raise ImportError(
            f"{function.__module__}.{function.__name__} has no parameter {', '.join(missing)} in "
            "this version"
        )
