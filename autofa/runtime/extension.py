"""The torch operator's library: loaded once, and its C surface as Python functions.

Everything here is thread-safe. Where the library is absent or does not load, `available()` is
False, `reason()` says why, and every other function raises `LaunchError` with that reason.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int32, c_int64
from typing import Any

from autofa import resources
from autofa.errors import LaunchError
from autofa.runtime.abi import MIRRORS, LaunchKey

__all__ = [
    "COUNTERS",
    "LaunchKey",
    "add_library",
    "add_vendor",
    "available",
    "bucket",
    "counters",
    "flags",
    "load",
    "reason",
    "set_flags",
    "set_miss",
    "table_clear",
    "table_get",
    "table_set",
]

_log = logging.getLogger("autofa")
_MISS = ctypes.CFUNCTYPE(c_int64, POINTER(LaunchKey))
_ERROR_BYTES = 1024

COUNTERS = ("own", "vendor", "fallback", "miss")

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_failure: str | None = None
# ctypes callbacks must outlive every call that may still be inside one: never dropped.
_callbacks: list[Any] = []


def _load() -> ctypes.CDLL:
    import torch

    path = resources.runtime_library()
    if not path.is_file():
        raise OSError(f"{path} is not there; install autofa so that it is built")
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    library = ctypes.CDLL(str(path))
    for name, result, arguments in (
        ("autofa_set_miss", None, (_MISS,)),
        ("autofa_add_library", c_int64, (c_char_p, c_char_p, c_int32, c_char_p, c_int64)),
        ("autofa_add_vendor", c_int64, (c_char_p,)),
        ("autofa_table_set", None, (POINTER(LaunchKey), c_int64)),
        ("autofa_table_get", c_int64, (POINTER(LaunchKey),)),
        ("autofa_table_clear", None, ()),
        ("autofa_set_flags", None, (c_int32,)),
        ("autofa_get_flags", c_int32, ()),
        ("autofa_counters", c_int64, (c_int32,)),
        ("autofa_bucket", c_int64, (c_int64,)),
        ("autofa_sizeof", c_int64, (c_int32,)),
        ("autofa_version", c_char_p, ()),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    for index, mirror in enumerate(MIRRORS):
        if library.autofa_sizeof(index) != ctypes.sizeof(mirror):
            raise OSError(f"{path} was built from other sources; reinstall autofa")
    # No callback may enter an interpreter that is going away.
    atexit.register(library.autofa_set_miss, _MISS())
    return library


def _get() -> ctypes.CDLL:
    global _library, _failure
    if _library is not None:
        return _library
    with _lock:
        if _library is None and _failure is None:
            try:
                _library = _load()
            except (ImportError, OSError, RuntimeError, AttributeError) as error:
                _failure = f"the runtime operator is not usable: {error}"
                _log.info(_failure)
        if _library is None:
            raise LaunchError(_failure)
        return _library


def load() -> None:
    """Loads the operators `autofa::fwd` and `autofa::run`; later calls do nothing.

    Raises:
        LaunchError: the library is absent, or does not load under this torch.
    """
    _get()


def available() -> bool:
    """Whether the operators exist; loads them on the first call."""
    try:
        _get()
    except LaunchError:
        return False
    return True


def reason() -> str | None:
    """Why the operators are not available; None if they are."""
    return None if available() else _failure


def set_miss(callback: Callable[[LaunchKey], int] | None) -> None:
    """What answers for a key that is not in the table: a kernel id, stored for the key.

    A negative answer, or an exception, is torch.sdpa for that call and is not stored. The callback
    runs in the thread of the call, holds the GIL and no lock of the runtime, and may run several
    times at once. None: every miss is torch.sdpa.
    """
    library = _get()
    if callback is None:
        library.autofa_set_miss(_MISS())
        return

    def guarded(key: Any) -> int:
        try:
            return callback(LaunchKey.from_buffer_copy(key.contents))
        except Exception:
            _log.exception("choosing a kernel failed; torch.sdpa answers this call")
            return -1

    function = _MISS(guarded)
    _callbacks.append(function)
    library.autofa_set_miss(function)


def add_library(path: str, slug: str, alignment: int) -> int:
    """Loads a variant library; the id of its kernel, the same one for the same file.

    Raises:
        LaunchError: it cannot be loaded, speaks another ABI, or is not the variant `slug`.
    """
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    found: int = _get().autofa_add_library(
        os.fsencode(path), slug.encode(), alignment, error, _ERROR_BYTES
    )
    if found < 0:
        raise LaunchError(error.value.decode(errors="replace"))
    return found


def add_vendor(slug: str) -> int:
    """The id of a vendor kernel; 0 is torch.sdpa.

    Raises:
        LaunchError: the runtime has no adapter of that name.
    """
    found: int = _get().autofa_add_vendor(slug.encode())
    if found < 0:
        raise LaunchError(f"{slug}: the runtime has no adapter of that name")
    return found


def table_set(key: LaunchKey, kernel: int) -> None:
    """Inserts, or swaps, the kernel of a key. A negative id removes it."""
    _get().autofa_table_set(ctypes.byref(key), kernel)


def table_get(key: LaunchKey) -> int:
    """The kernel id of a key, -1 if it is not in the table."""
    found: int = _get().autofa_table_get(ctypes.byref(key))
    return found


def table_clear() -> None:
    """Forgets every key."""
    _get().autofa_table_clear()


def set_flags(flags: int) -> None:
    """What becomes part of every later key, process-wide: `abi.FLAG_*`, or-ed."""
    _get().autofa_set_flags(flags)


def flags() -> int:
    """The flags as a key holds them."""
    found: int = _get().autofa_get_flags()
    return found


def counters() -> dict[str, int]:
    """How often, since the process started, each of `COUNTERS` happened."""
    library = _get()
    return {name: library.autofa_counters(index) for index, name in enumerate(COUNTERS)}


def bucket(n: int) -> int:
    """The runtime's twin of `problem.nearest_power_of_two`."""
    found: int = _get().autofa_bucket(n)
    return found
