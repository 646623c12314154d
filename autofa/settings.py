"""The only reader of the environment. Everything else receives a `Settings`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autofa.errors import UsageError, explain_bad

LOG_LEVELS = ("debug", "info", "warning", "error")
PRECISIONS = ("f32", "fast")


@dataclass(frozen=True)
class Settings:
    """What the environment says. `None` means: not set, use the default.

    Attributes:
        db: path or SQLAlchemy URL of the database.
        cache_dir: where compiled variants are kept.
        precision: accuracy class, "f32" or "fast".
        force_kernel: slug that every call must use.
        disable: True routes every call to plain SDPA.
        log: log level name.
        max_jobs: parallel compilations.
        cuda_home: root of a CUDA toolkit.
        cxx: the C++ compiler's command.
    """

    db: str | None = None
    cache_dir: Path | None = None
    precision: str = "f32"
    force_kernel: str | None = None
    disable: bool = False
    log: str = "warning"
    max_jobs: int | None = None
    cuda_home: Path | None = None
    cxx: tuple[str, ...] | None = None
    search_path: str = ""


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value.lower() not in allowed:
        raise UsageError(explain_bad(name, value, ", ".join(allowed), "set it to one of these"))
    return value.lower()


def _jobs(value: str | None) -> int | None:
    if value is None or not value.strip():
        return None
    # Nobody has a thousand cores to spare; isdigit() alone also takes what int() does not.
    if not re.fullmatch(r"0*[1-9][0-9]{0,3}", value.strip(), re.ASCII):
        do = "set it to a number of parallel compilations, or unset it"
        raise UsageError(explain_bad("MAX_JOBS", value, "a whole number from 1 to 9999", do))
    return int(value)


def _folder(name: str, value: str | None) -> Path | None:
    if not value:
        return None
    try:
        return Path(value).expanduser()
    except RuntimeError:
        do = "write the folder's whole path"
        raise UsageError(explain_bad(name, value, "a folder; ~USER of a known user", do)) from None


def _command(name: str, value: str | None) -> tuple[str, ...] | None:
    try:
        words = tuple(shlex.split(value or ""))
    except ValueError as error:
        supported = "a command as a shell reads it"
        raise UsageError(explain_bad(name, value, supported, f"mend it: {error}")) from None
    return words or None


def _flag(name: str, value: str) -> bool:
    lowered = value.strip().lower()
    if lowered in ("", "0", "false", "no", "off"):
        return False
    if lowered in ("1", "true", "yes", "on"):
        return True
    raise UsageError(explain_bad(name, value, "0 or 1", "set it to one of these"))


_Environment = Mapping[str, str]

# field of Settings -> how it is read.
_READERS: dict[str, Callable[[_Environment], object]] = {
    "db": lambda env: env.get("AUTOFA_DB") or None,
    "cache_dir": lambda env: _folder("AUTOFA_CACHE_DIR", env.get("AUTOFA_CACHE_DIR")),
    "precision": lambda env: _choice(
        "AUTOFA_PRECISION", env.get("AUTOFA_PRECISION") or "f32", PRECISIONS
    ),
    "force_kernel": lambda env: env.get("AUTOFA_FORCE_KERNEL") or None,
    "disable": lambda env: _flag("AUTOFA_DISABLE", env.get("AUTOFA_DISABLE", "")),
    "log": lambda env: _choice("AUTOFA_LOG", env.get("AUTOFA_LOG") or "warning", LOG_LEVELS),
    "max_jobs": lambda env: _jobs(env.get("MAX_JOBS")),
    "cuda_home": lambda env: _folder("CUDA_HOME", env.get("CUDA_HOME")),
    "cxx": lambda env: _command("CXX", env.get("CXX")),
    "search_path": lambda env: env.get("PATH", os.defpath),
}


def load() -> Settings:
    """Reads the environment now.

    Raises:
        UsageError: a variable holds a value that is not understood.
    """
    return Settings(**{name: read(os.environ) for name, read in _READERS.items()})  # type: ignore[arg-type]


def load_usable() -> tuple[Settings, tuple[UsageError, ...]]:
    """What of the environment is understood, and what is not. Never raises."""
    values: dict[str, object] = {}
    complaints = []
    for name, read in _READERS.items():
        try:
            values[name] = read(os.environ)
        except UsageError as error:
            complaints.append(error)
    return Settings(**values), tuple(complaints)  # type: ignore[arg-type]


def gpus_are_hidden() -> bool:
    """Whether the environment hides every GPU from CUDA's programs on purpose."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")


def cache_dir(settings: Settings) -> Path:
    """Where compiled variants are kept (not created here)."""
    if settings.cache_dir is not None:
        return settings.cache_dir
    import platformdirs

    return Path(platformdirs.user_cache_dir("autofa", appauthor=False))


def database(settings: Settings) -> str:
    """The database's path or URL (nothing is created or opened here)."""
    if settings.db is not None:
        return settings.db
    import platformdirs

    return str(Path(platformdirs.user_data_dir("autofa", appauthor=False)) / "autofa.db")


def without_secrets(location: str) -> str:
    """A database's path or URL for people to read: no password, no values of a URL's query."""
    scheme, separator, rest = location.partition("://")
    if not separator or scheme.startswith("sqlite"):
        return location
    # The last @ ends the password, whatever it holds that should have been escaped.
    login, at, place = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    hidden = "***" if colon else ""
    place = re.sub(r"=[^&]*", "=***", place)
    return f"{scheme}://{user}{colon}{hidden}{at}{place}"
