"""Profiles from TOML files; `docs/profiles.md` is for those who write them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autofa.errors import UsageError, explain_bad
from autofa.problem import MASKS, Problem, check, parse_dtype, parse_shape
from autofa.tuning.profiles import BOTH, PROFILE_NAMES, Group, Profile, built_in

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# A list of shapes is some kilobytes; what is far larger is another file.
_MOST_BYTES = 2**20
_KEYS = ("trials", "group")
_GROUP_KEYS = ("shapes", "dtypes", "masks")
_EXAMPLE = '[[group]] with shapes = ["1,8,1024,64"]'


def find_profile(name: str, device: str) -> Profile:
    """The built-in profile of that name for `cuda` or `cpu`, or the one in the file `name`.

    Raises:
        UsageError: there is neither, or the file is not a profile; it names the line or the key.
    """
    if not name.endswith(".toml"):
        return built_in(name, device)
    path = Path(name).expanduser()
    return _profile(_read(path), path, device)


def _read(path: Path) -> dict[str, Any]:
    def bad(got: object, supported: str, do: str) -> UsageError:
        return UsageError(explain_bad(f"profile {path}", got, supported, do))

    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        do = f"check the path, or name one of {', '.join(PROFILE_NAMES)}"
        raise bad(reason, "a readable file", do) from None
    if len(content) > _MOST_BYTES:
        raise bad("more than 1 MiB", "a list of shapes", "check the path")
    try:
        document: dict[str, Any] = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        # Its text says at which line and column.
        reason = "tables without end" if isinstance(error, RecursionError) else str(error)
        raise bad(reason, f"TOML in UTF-8: {_EXAMPLE}", "mend the file there") from None
    return document


def _profile(document: dict[str, Any], path: Path, device: str) -> Profile:
    _only(document, _KEYS, str(path))
    trials = document.get("trials", built_in("default", device).trials)
    if not isinstance(trials, int) or isinstance(trials, bool) or trials < 1:
        do = "set it to the own variants to try per bucket, or leave it out"
        raise UsageError(explain_bad(f"{path}: trials", trials, "a whole number >= 1", do))
    tables = document.get("group")
    if not isinstance(tables, list) or not tables:
        got = "nothing" if tables is None else tables
        raise UsageError(explain_bad(f"{path}: group", got, _EXAMPLE, "add at least one"))
    groups = tuple(
        _group(table, f"{path}: group {number}", device) for number, table in enumerate(tables, 1)
    )
    return Profile(path.stem, device, trials, groups)


def _only(table: dict[str, Any], keys: Sequence[str], where: str) -> None:
    for key in table:
        if key not in keys:
            do = "mend its name, or remove it"
            raise UsageError(explain_bad(f"{where}: key", key, ", ".join(keys), do))


def _group(table: Any, where: str, device: str) -> Group:
    if not isinstance(table, dict):
        raise UsageError(explain_bad(where, table, _EXAMPLE, "write it as a table"))
    _only(table, _GROUP_KEYS, where)
    usual = ("f16",) if device == "cuda" else ("f32",)
    shapes = _texts(table, "shapes", (), where, lambda text: _shape(text, device))
    dtypes = _texts(table, "dtypes", usual, where, parse_dtype)
    masks = _texts(table, "masks", BOTH, where, _mask)
    group = Group(shapes, tuple(map(parse_dtype, dtypes)), masks)
    for problem in group.problems(device):
        with _at(f"{where}: {problem.shape}, {problem.mask}"):
            check(problem)
    return group


def _texts(
    table: dict[str, Any],
    key: str,
    usual: tuple[str, ...],
    where: str,
    valid: Callable[[str], object],
) -> tuple[str, ...]:
    """The texts of a list, each tried by `valid`."""
    found = table.get(key, list(usual))
    if not isinstance(found, list) or not found or not all(isinstance(v, str) for v in found):
        got = found if key in table else "nothing"
        do = f"write it like {_EXAMPLE}"
        raise UsageError(explain_bad(f"{where}: {key}", got, "a list of texts", do))
    for text in found:
        with _at(f"{where}: {key}"):
            valid(text)
    return tuple(found)


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Has what is wrong say where that stands."""
    try:
        yield
    except UsageError as error:
        raise type(error)(f"{where}: {error}") from None


def _shape(text: str, device: str) -> Problem:
    return parse_shape(text, dtype="f16", device=device)


def _mask(text: str) -> str:
    if text not in MASKS:
        raise UsageError(explain_bad("mask", text, ", ".join(MASKS), "choose one of these"))
    return text
