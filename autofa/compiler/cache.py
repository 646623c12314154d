"""Where libraries lie, and which of them may be loaded.

    <cache>/variants/<target>/<slug>-<fingerprint>.so      the library
                              <slug>-<fingerprint>.json    its record
                              <slug>-<fingerprint>.log     the compiler's output, after a failure

A library is published by renaming, after its record. It is used only as long as it is what the
record says: the loader maps a file without reading it, and a page that is not there any more kills
the process (SIGBUS), where a Python exception could be answered. Prebuilt ones lie under the same
names in `resources.native_dir()/variants`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autofa.compiler.diagnostics import Usage
from autofa.compiler.fingerprint import fingerprint
from autofa.errors import ToolchainError
from autofa.kernels.family import Variant
from autofa.resources import native_dir
from autofa.settings import Settings, cache_dir

# What `damage` says of a library of before checksums were written.
NO_CHECKSUM = "its record has no checksum"

_log = logging.getLogger("autofa.compiler")


@dataclass(frozen=True)
class Record:
    """What is known of a library beside its code.

    Attributes:
        compiler: first telling line of the compiler's `--version`.
        seconds, cpu_seconds: wall and CPU time that its compilation took.
        usage: None on CPU.
        size, sha256: of the library; 0 and empty in a record of before they were written.
    """

    slug: str
    target: str
    fingerprint: str
    compiler: str
    seconds: float
    cpu_seconds: float
    usage: Usage | None
    size: int = 0
    sha256: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def directory(settings: Settings, target: str) -> Path:
    """Where libraries for `target` are kept. Not created here."""
    return cache_dir(settings) / "variants" / target


def stem(variant: Variant, target: str) -> str:
    """The file name of a library without its suffix."""
    return f"{variant.slug}-{fingerprint(variant, target)[:12]}"


# Memos of this process. A race between threads costs a repeated look, never a wrong one.
_Stamp = tuple[int, ...]
_looked: dict[Path, tuple[_Stamp, _Stamp, str | None]] = {}
_said: set[tuple[Path, str]] = set()


def _say_once(place: Path, message: str, *details: object) -> None:
    """Warns once per place and kind of message: a look-up asks for many libraries, many times."""
    if (place, message) not in _said:
        _said.add((place, message))
        _log.warning(message, *details)


def _stamp(path: Path) -> _Stamp:
    """Changes whenever the content may have.

    Raises:
        OSError: it is not there, or no regular file.
    """
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise OSError(0, "no regular file")
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _difference(library: Path, record: Record | None) -> str | None:
    """How the file differs from what its record says; None if it does not."""
    if record is None:
        return "its record cannot be read"
    if not record.sha256:
        return None if library.is_relative_to(native_dir()) else NO_CHECKSUM
    size = library.stat().st_size
    if size != record.size:
        return f"it has {size} bytes, not {record.size}"
    if hashlib.sha256(library.read_bytes()).hexdigest() != record.sha256:
        return "its content has changed"
    return None


def damage(library: Path) -> str | None:
    """Why the file is not the library that was published there; None if it is.

    Reads it once per process, and again when the file or its record has been replaced or changed.

    Raises:
        FileNotFoundError: nothing is there.
    """
    library.stat()
    try:
        own = _stamp(library)
    except FileNotFoundError:
        raise
    except OSError as error:
        return error.strerror
    try:
        stamps = own, _stamp(library.with_suffix(".json"))
    except OSError as error:
        return f"its record: {error.strerror}"
    known = _looked.get(library)
    if known is None or known[:2] != stamps:
        known = _looked[library] = (*stamps, _difference(library, record_of(library)))
    return known[2]


def distrust(path: Path) -> str | None:
    """Why nothing at `path` should be loaded; None if only its owner or root could have made it."""
    info = path.stat()
    if info.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {info.st_uid}, not to you"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it"
    return None


def _is_sound(library: Path) -> bool:
    """Whether it is there and whole; says once per folder where one is not."""
    try:
        reason = damage(library)
    except OSError:
        return False
    if reason is not None:
        say = "%s is damaged and not loaded: %s; it is compiled again where a compiler is needed"
        _say_once(library.parent, say, library, reason)
    return reason is None


def cached_library(variant: Variant, target: str, settings: Settings) -> Path | None:
    """The library in the cache, if it is there, whole, and only its user can have put it there."""
    folder = directory(settings, target)
    library = folder / f"{stem(variant, target)}.so"
    try:
        for path in (library, folder):
            reason = distrust(path)
            if reason is not None:
                _say_once(path, "%s is not loaded: %s", path, reason)
                return None
    except OSError:
        return None
    return library if _is_sound(library) else None


def prebuilt_library(variant: Variant, target: str) -> Path | None:
    """The library that was installed with the package."""
    # As trustworthy as the Python files beside it, whatever its mode.
    library = native_dir() / "variants" / target / f"{stem(variant, target)}.so"
    return library if _is_sound(library) else None


def library_of(variant: Variant, target: str, settings: Settings) -> Path | None:
    """The library of `variant` for `target`: the cache's, else the prebuilt one, else None.

    Thread-safe; compiles nothing, creates nothing, needs no compiler. A library that is damaged, or
    that another user could have written, is passed over with a warning.

    Raises:
        UsageError: an unknown target.
    """
    return cached_library(variant, target, settings) or prebuilt_library(variant, target)


def slugs_built(settings: Settings) -> frozenset[str]:
    """The slugs of all libraries there are, in the cache and prebuilt, for whatever target and of
    whatever sources: `library_of` says which may be loaded."""
    roots = (cache_dir(settings) / "variants", native_dir() / "variants")
    return frozenset(
        library.stem.rpartition("-")[0] for root in roots for library in root.glob("*/*.so")
    )


def record_of(library: Path) -> Record | None:
    """The record beside a library; None if it is missing or not readable as one."""
    try:
        fields = json.loads(library.with_suffix(".json").read_text())
        usage = fields.pop("usage")
        return Record(**fields, usage=Usage(**usage) if usage else None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


# What a compiler writes when the disk or the user's part of it is full.
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_DO = "set AUTOFA_CACHE_DIR to a folder of your own"


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises as `ToolchainError` that something cannot be written to the cache."""
    try:
        yield
    except OSError as error:
        do = "free that disk, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ToolchainError(f"cache: got {folder}: {error.strerror}; {do}{_DO}") from None


def refuse_full(folder: Path, log: str) -> None:
    """Raises `ToolchainError` if a compilation failed because the disk is full."""
    with writing(folder):
        # Linkers that map their output die of a signal instead of saying so.
        if _FULL.search(log) or shutil.disk_usage(folder).free < 1 << 16:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def make_private(folder: Path) -> None:
    """Creates `folder` and its parents for this user alone, and takes others' rights away.

    Raises:
        ToolchainError: it cannot be written, or belongs to somebody else.
    """
    with writing(folder):
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)
        owner = folder.stat().st_uid
        if owner not in (0, os.geteuid()):
            raise ToolchainError(f"cache: got {folder}, which belongs to user {owner}; {_DO}")
        if owner == os.geteuid():
            folder.chmod(0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ToolchainError(f"cache: got {folder}, which cannot be written; {_DO}")


def publish(built: Path, folder: Path, name: str, record: Record) -> Path:
    """Moves a finished library, which lies on the same file system, to its place.

    Raises:
        OSError: the disk is full, or the folder has gone.
    """
    library = folder / f"{name}.so"
    built.chmod(0o644)
    content = built.read_bytes()
    record = replace(record, size=len(content), sha256=hashlib.sha256(content).hexdigest())
    draft = built.with_suffix(".record")
    draft.write_text(record.to_json() + "\n")
    draft.chmod(0o644)
    if library.is_symlink() or not library.is_dir():
        # While it is replaced it is missing: beside the new record the old one would be damaged.
        library.unlink(missing_ok=True)
    for source, place in ((draft, library.with_suffix(".json")), (built, library)):
        if place.is_dir() and not place.is_symlink():
            # Renaming replaces anything but a directory; that one goes with the build folder.
            place.rename(source.with_name(f"{place.name}.displaced"))
        source.rename(place)
    library.with_suffix(".log").unlink(missing_ok=True)
    return library
