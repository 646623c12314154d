"""Where libraries lie, and which of them may be loaded.

    <cache>/variants/<target>/<slug>-<fingerprint>.so      the library
                              <slug>-<fingerprint>.json    its record
                              <slug>-<fingerprint>.log     the compiler's output, after a failure

A library is published by renaming, after its record: one that can be seen is whole. Prebuilt ones
lie under the same names in `resources.native_dir()/variants`.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from autofa.compiler.diagnostics import Usage
from autofa.compiler.fingerprint import fingerprint
from autofa.errors import ToolchainError
from autofa.kernels.family import Variant
from autofa.resources import native_dir
from autofa.settings import Settings, cache_dir

_log = logging.getLogger("autofa.compiler")


@dataclass(frozen=True)
class Record:
    """What is known of a library beside its code.

    Attributes:
        compiler: first telling line of the compiler's `--version`.
        seconds, cpu_seconds: wall and CPU time that its compilation took.
        usage: None on CPU.
    """

    slug: str
    target: str
    fingerprint: str
    compiler: str
    seconds: float
    cpu_seconds: float
    usage: Usage | None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def directory(settings: Settings, target: str) -> Path:
    """Where libraries for `target` are kept. Not created here."""
    return cache_dir(settings) / "variants" / target


def stem(variant: Variant, target: str) -> str:
    """The file name of a library without its suffix."""
    return f"{variant.slug}-{fingerprint(variant, target)[:12]}"


def _distrust(path: Path) -> str | None:
    """Why nothing at `path` should be loaded; None if only its owner or root could have made it."""
    info = path.stat()
    if info.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {info.st_uid}, not to you"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it"
    return None


def cached_library(variant: Variant, target: str, settings: Settings) -> Path | None:
    """The library in the cache, if it is there and only its user can have put it there."""
    folder = directory(settings, target)
    library = folder / f"{stem(variant, target)}.so"
    try:
        for path in (library, folder):
            reason = _distrust(path)
            if reason is not None:
                _log.warning("%s is not loaded: %s", path, reason)
                return None
    except OSError:
        return None
    return library


def prebuilt_library(variant: Variant, target: str) -> Path | None:
    """The library that was installed with the package."""
    # As trustworthy as the Python files beside it, whatever its mode: no check of its own.
    library = native_dir() / "variants" / target / f"{stem(variant, target)}.so"
    return library if library.is_file() else None


def library_of(variant: Variant, target: str, settings: Settings) -> Path | None:
    """The library of `variant` for `target`: the cache's, else the prebuilt one, else None.

    Thread-safe; compiles nothing, creates nothing, needs no compiler. A library that another user
    could have written is passed over with a warning.

    Raises:
        UsageError: an unknown target.
    """
    return cached_library(variant, target, settings) or prebuilt_library(variant, target)


def record_of(library: Path) -> Record | None:
    """The record beside a library; None if it is missing or not readable as one."""
    try:
        fields = json.loads(library.with_suffix(".json").read_text())
        usage = fields.pop("usage")
        return Record(**fields, usage=Usage(**usage) if usage else None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def make_private(folder: Path) -> None:
    """Creates `folder` and its parents for this user alone, and takes others' rights away.

    Raises:
        ToolchainError: it cannot be written, or belongs to somebody else.
    """
    do = "set AUTOFA_CACHE_DIR to a folder of your own"
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)
        owner = folder.stat().st_uid
        if owner not in (0, os.geteuid()):
            raise ToolchainError(f"cache: got {folder}, which belongs to user {owner}; {do}")
        if owner == os.geteuid():
            folder.chmod(0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ToolchainError(f"cache: got {folder}, which cannot be written; {do}")
    except OSError as error:
        raise ToolchainError(f"cache: got {folder}: {error.strerror}; {do}") from None


def publish(built: Path, folder: Path, name: str, record: Record) -> Path:
    """Moves a finished library, which lies on the same file system, to its place.

    Raises:
        OSError: the disk is full, or the folder has gone.
    """
    library = folder / f"{name}.so"
    built.chmod(0o644)
    draft = built.with_suffix(".record")
    draft.write_text(record.to_json() + "\n")
    draft.chmod(0o644)
    draft.rename(library.with_suffix(".json"))
    built.rename(library)
    library.with_suffix(".log").unlink(missing_ok=True)
    return library
