"""The only reader of the environment. Everything else receives a `Settings`."""

from __future__ import annotations

import os
import re
import shlex
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
    if not value.strip().isdigit() or int(value) < 1:
        do = "set it to a number of parallel compilations, or unset it"
        raise UsageError(explain_bad("MAX_JOBS", value, "a whole number >= 1", do))
    return int(value)


def _flag(name: str, value: str) -> bool:
    lowered = value.strip().lower()
    if lowered in ("", "0", "false", "no", "off"):
        return False
    if lowered in ("1", "true", "yes", "on"):
        return True
    raise UsageError(explain_bad(name, value, "0 or 1", "set it to one of these"))


def load() -> Settings:
    """Reads the environment now.

    Raises:
        UsageError: a variable holds a value that is not understood.
    """
    env = os.environ
    cache = env.get("AUTOFA_CACHE_DIR")
    cuda_home = env.get("CUDA_HOME")
    cxx = env.get("CXX")
    return Settings(
        db=env.get("AUTOFA_DB") or None,
        cache_dir=Path(cache).expanduser() if cache else None,
        precision=_choice("AUTOFA_PRECISION", env.get("AUTOFA_PRECISION") or "f32", PRECISIONS),
        force_kernel=env.get("AUTOFA_FORCE_KERNEL") or None,
        disable=_flag("AUTOFA_DISABLE", env.get("AUTOFA_DISABLE", "")),
        log=_choice("AUTOFA_LOG", env.get("AUTOFA_LOG") or "warning", LOG_LEVELS),
        max_jobs=_jobs(env.get("MAX_JOBS")),
        cuda_home=Path(cuda_home).expanduser() if cuda_home else None,
        cxx=tuple(shlex.split(cxx)) if cxx else None,
        search_path=env.get("PATH", os.defpath),
    )


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
