"""autofa: the fastest attention kernel for every shape, measured once per machine.

`attention` is `torch.nn.functional.scaled_dot_product_attention` with a table of winners behind
it. Names load on first use, so that `import autofa` costs nothing but itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofa._version import __version__
    from autofa.dispatch.explanation import Explanation
    from autofa.dispatch.face import attention
    from autofa.dispatch.forcing import force_kernel
    from autofa.dispatch.inspection import explain
    from autofa.dispatch.state import reload, set_precision
    from autofa.dispatch.warming import warmup
    from autofa.errors import AutofaError
    from autofa.integrations.sdpa_patch import patch_sdpa
    from autofa.problem import Problem
    from autofa.tuning.api import tune

__all__ = [
    "AutofaError",
    "Explanation",
    "Problem",
    "__version__",
    "attention",
    "explain",
    "force_kernel",
    "patch_sdpa",
    "reload",
    "set_precision",
    "tune",
    "warmup",
]

_HOMES = {
    "AutofaError": "autofa.errors",
    "Explanation": "autofa.dispatch.explanation",
    "Problem": "autofa.problem",
    "__version__": "autofa._version",
    "attention": "autofa.dispatch.face",
    "explain": "autofa.dispatch.inspection",
    "force_kernel": "autofa.dispatch.forcing",
    "patch_sdpa": "autofa.integrations.sdpa_patch",
    "reload": "autofa.dispatch.state",
    "set_precision": "autofa.dispatch.state",
    "tune": "autofa.tuning.api",
    "warmup": "autofa.dispatch.warming",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'autofa' has no attribute {name!r}")
    from autofa import collector

    with collector.paused():
        module = import_module(home)
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
