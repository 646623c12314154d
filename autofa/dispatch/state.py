"""What this process has decided once: whether the operator is there, its table, its flags."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autofa import settings as settings_module
from autofa.dispatch import fake, gradients, shortcut
from autofa.dispatch.table import Table
from autofa.errors import DOCTOR, UsageError, explain_bad
from autofa.runtime import extension, python_face
from autofa.runtime.abi import FLAG_DETERMINISTIC, FLAG_FAST, LaunchKey
from autofa.settings import PRECISIONS, Settings

log = logging.getLogger("autofa")


def _not_loaded(*args: object) -> Tensor:
    raise RuntimeError("the runtime library is not loaded")


@dataclass
class State:
    """The mutable state of dispatch; there is one per process.

    Attributes:
        direct: attention may call the operator and ask nothing more. False where autofa is off,
            or while a kernel is forced anywhere in the process.
        deterministic: what the runtime was last told of torch's deterministic mode.
        off: why every call goes to plain SDPA; empty if none has to.
        forced: the kernel that the environment forces.
        forcing: how many `force_kernel` blocks are open in the process.
        fwd: the operator as a raw callable; `OpOverload.__call__` costs 0.25 us more.
        face: answers the usual calls, and None to others.
    """

    direct: bool = False
    deterministic: bool = False
    off: str = "not started"
    forced: str | None = None
    forcing: int = 0
    precision: str = "f32"
    settings: Settings = field(default_factory=Settings)
    table: Table | None = None
    fwd: Callable[..., Tensor] = _not_loaded
    face: Callable[..., Any] = python_face.nobody

    def refresh(self) -> None:
        """Recomputes `direct`, and tells the runtime its flags."""
        self.direct = not self.off and self.forced is None and self.forcing == 0
        shortcut.forget()
        gradients.forget()
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        if not self.off:
            extension.set_flags(
                FLAG_DETERMINISTIC * self.deterministic | FLAG_FAST * (self.precision == "fast")
            )


STATE = State()
_lock = threading.RLock()


def _read_settings() -> Settings:
    """The environment's settings. Values that are not understood cost one warning, no call."""
    settings, complaints = settings_module.load_usable()
    if complaints:
        more = f"; {len(complaints) - 1} more" if len(complaints) > 1 else ""
        log.warning("a setting is not used: %s%s; %s", complaints[0], more, DOCTOR)
    return settings


def _set_up_log(level: str) -> None:
    """Follows AUTOFA_LOG, unless the program has set up this logger itself."""
    if log.level == logging.NOTSET:
        log.setLevel(level.upper())
        if level != "warning" and not log.hasHandlers():
            log.addHandler(logging.StreamHandler())  # without one, Python drops what is below


def start() -> None:
    """Reads the settings and loads the operator. Opens no database. Idempotent, thread-safe."""
    with _lock:
        if STATE.off != "not started":
            return
        settings = STATE.settings = _read_settings()
        _set_up_log(settings.log)
        STATE.forced = settings.force_kernel
        STATE.precision = settings.precision
        if settings.disable:
            STATE.off = "AUTOFA_DISABLE is set"
        else:
            STATE.off = extension.reason() or ""
            if STATE.off:
                log.warning("%s; every call goes to plain SDPA; %s", STATE.off, DOCTOR)
            else:
                fake.register()
                STATE.fwd = torch.ops.autofa.fwd.default._op
                STATE.face = python_face.open_face(STATE.fwd, shortcut.restride)
                STATE.table = Table(settings)
                extension.set_miss(_miss)
        STATE.refresh()


def _miss(key: LaunchKey) -> int:
    table = STATE.table
    return 0 if table is None else table.miss(key)


def reload() -> None:
    """Forgets which kernel answers what, and reads database and seeds anew when next asked.

    After a `tune` in another process, or once a database that could not be read has been mended.
    Calls in flight end with the kernel they started with. Thread-safe.
    """
    start()
    with _lock:
        if STATE.off:
            return
        STATE.settings = _read_settings()
        if STATE.table is not None:
            STATE.table.retire()
        STATE.table = Table(STATE.settings)
        extension.table_clear()
        shortcut.forget()
        gradients.forget()


def set_precision(precision: str) -> None:
    """Admits (`fast`) or excludes (`f32`, the default) kernels that accumulate in less than f32.

    For the whole process; calls from now on are looked up anew.

    Raises:
        UsageError: another value.
    """
    if precision not in PRECISIONS:
        raise UsageError(
            explain_bad("precision", precision, ", ".join(PRECISIONS), "choose one of these")
        )
    start()
    with _lock:
        STATE.precision = precision
        STATE.refresh()


def precision(settings: Settings) -> str:
    """The accuracy class that calls of this process get: what `set_precision` said, else
    `settings`. Loads nothing."""
    return settings.precision if STATE.off == "not started" else STATE.precision


def enter_forcing(change: int) -> None:
    """Counts an opened (+1) or closed (-1) `force_kernel` block."""
    with _lock:
        STATE.forcing += change
        STATE.refresh()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    if STATE.table is not None:
        STATE.table.after_fork()


os.register_at_fork(after_in_child=_after_fork)
