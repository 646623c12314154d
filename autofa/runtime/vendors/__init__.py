"""Kernels that Python libraries bring, as operators that the runtime calls by name.

A library is imported when one of its kernels is first loaded as a candidate, never in a call that
is served already. Each kernel becomes `autofa_vendors::<slug with _ for .>`, whose adapter is the
file of this folder that bears the slug's first part; csrc/runtime/libraries.cpp calls it with views
in the library's own layout, and makes everything else of SDPA's meaning out of it.
"""

from __future__ import annotations

import _thread
import importlib.util
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from autofa.errors import LaunchError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("autofa")

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, float scale, bool causal)"
    " -> bool"
)
# Dispatch keys that operators are registered for.
KEYS = ("CUDA",)


@dataclass(frozen=True)
class Kernel:
    """What an adapter's `load(name)` returns; it raises whatever its library raises.

    Attributes:
        attend: `(q, k, v, out, lse, scale, causal)`: writes attention to `out` and, where `lse` is
            not None, the log-sum-exp (natural log, f32, (B, H, Nq), -inf for empty rows) to it.
            `causal` hangs on the lower-right corner; `scale` is positive.
        compiles: whether it compiles in its first call of a shape.
    """

    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, float, bool], None]
    compiles: bool = False


_lock = threading.Lock()
_failures: dict[str, str] = {}
_loaded: set[str] = set()
# Registrations end with the object that made them.
_registrations: list[object] = []


@cache
def _has_adapter(library: str) -> bool:
    return importlib.util.find_spec(f"{__name__}.{library}") is not None


def load(slug: str) -> None:
    """Imports what the kernel `slug` needs and registers its operator; later calls do nothing.

    A failure is final for the process: an import that failed half-way is not tried again.

    Raises:
        LaunchError: the library is absent or cannot be used; says why.
    """
    library, _, name = slug.partition(".")
    if not _has_adapter(library):
        return  # torch's own, which the runtime calls without Python
    with _lock:
        if slug in _loaded:
            return
        if slug not in _failures:
            try:
                adapter = importlib.import_module(f"{__name__}.{library}")
                _register(slug, adapter.load(name))
                _loaded.add(slug)
                return
            except Exception as error:
                text = str(error) or repr(error)
                _failures[slug] = f"{slug} is not usable: {text.strip().splitlines()[0]}"
        raise LaunchError(_failures[slug])


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# Another thread of the parent may hold it at the fork.
os.register_at_fork(after_in_child=_renew_lock)


def failure(slug: str) -> str | None:
    """Why a kernel could not be loaded in this process; None if it was not tried, or loaded."""
    return _failures.get(slug)


def pending(slug: str) -> bool:
    """Whether loading it means to import a library, which takes seconds, or failed."""
    return slug not in _loaded and _has_adapter(slug.partition(".")[0])


def _register(slug: str, kernel: Kernel) -> None:
    import torch

    name = slug.replace(".", "_")
    library = torch.library.Library("autofa_vendors", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(name + SCHEMA)  # type: ignore[no-untyped-call]
    function = _told(slug, _compiled_before_capture(kernel) if kernel.compiles else _plain(kernel))
    for key in KEYS:
        library.impl(name, function, key)  # type: ignore[no-untyped-call]
    _registrations.append(library)


Operator = Callable[["Tensor", "Tensor", "Tensor", "Tensor", "Tensor | None", float, bool], bool]


def _plain(kernel: Kernel) -> Operator:
    attend = kernel.attend

    def call(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, causal: bool
    ) -> bool:
        attend(q, k, v, out, lse, scale, causal)
        return True

    return call


def _compiled_before_capture(kernel: Kernel) -> Operator:
    """Declines, within the capture of a CUDA graph, what was not called outside one before: a
    compilation loads modules, which may end the capture."""
    import torch

    attend = kernel.attend
    capturing = torch.cuda.is_current_stream_capturing
    seen: set[object] = set()

    def call(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, causal: bool
    ) -> bool:
        kind = (q.dtype, q.device, q.shape, k.shape, v.shape, lse is None, causal)
        if kind not in seen:
            if q.is_cuda and capturing():
                return False
            attend(q, k, v, out, lse, scale, causal)
            seen.add(kind)
            return True
        attend(q, k, v, out, lse, scale, causal)
        return True

    return call


def _told(slug: str, call: Operator) -> Operator:
    """Says the first failure in the log: the runtime, which then lets SDPA answer, cannot."""
    warned = False

    def guarded(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, causal: bool
    ) -> bool:
        nonlocal warned
        try:
            return call(q, k, v, out, lse, scale, causal)
        except KeyboardInterrupt:
            _thread.interrupt_main()  # raised again where Python can hand it to the caller
            return False
        except Exception as error:
            if not warned:
                warned = True
                log.warning("%s failed for query %s: %s", slug, tuple(q.shape), error)
            raise

    return guarded
