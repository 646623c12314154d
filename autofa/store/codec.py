"""Rows as JSON lines, the form in which measurements travel between machines."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NoReturn

from autofa.device import DeviceKey
from autofa.problem import Problem
from autofa.store.rows import NUMBERS, PARTS, ROW_FIELDS, Provenance, Row, document, row_defect

MAX_LINE = 64 * 1024


def to_json(row: Row) -> str:
    """One line, without its newline: every field, and `hash`, the row's content hash."""
    found = {**document(row), "hash": row.content_hash}
    return json.dumps(found, separators=(",", ":"), allow_nan=False)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def load_strict(text: str) -> Any:
    """`json.loads` without NaN, Infinity and keys that are there twice, of which readers differ
    in which one they believe.

    Raises:
        ValueError: the text is not strict JSON, nested too deep included.
    """
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_doubles)
    except RecursionError:
        raise ValueError("nested too deep") from None


def part(name: str, value: object) -> dict[str, Any]:
    """The object's fields, exactly those of a row's device, problem or provenance.

    Raises:
        ValueError: it is no object, or has other fields.
    """
    wanted = PARTS[name]
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    if value.keys() != set(wanted):
        raise ValueError(f"{name} has not exactly the fields {', '.join(wanted)}")
    return value


def as_float(value: object) -> object:
    """A number that JSON wrote without its point, as a float; other numbers and null as they are.

    Raises:
        ValueError: it is something else.
    """
    if value is None or type(value) is float:
        return value
    if type(value) is not int or abs(value) > 2**53:
        raise ValueError(f"{value!r:.40} is not a number")
    return float(value)


def from_json(text: str, line: int = 1) -> Row:
    """The row that a line of `to_json` holds.

    Args:
        line: the line's number, for the message.

    Raises:
        ValueError: the line is no such row; the message names the line and the reason.
    """
    try:
        if len(text) > MAX_LINE:
            raise ValueError(f"longer than {MAX_LINE} characters")
        return _row(load_strict(text))
    except ValueError as error:
        raise ValueError(f"line {line}: {error}") from None


_KINDS: dict[str, Any] = {"device": DeviceKey, "problem": Problem, "provenance": Provenance}


@lru_cache(maxsize=1 << 14, typed=True)
def _made(name: str, *values: object) -> Any:
    return _KINDS[name](*values)


def _shared(name: str, fields: dict[str, Any]) -> Any:
    """A part of a row, one object for all rows that have it: two thirds of a row's memory."""
    values = [fields[field] for field in PARTS[name]]
    try:
        return _made(name, *values)
    except TypeError:  # a list or an object among them, which the checks refuse by name
        return _KINDS[name](*values)


def _row(value: object) -> Row:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    given = value.pop("hash", None)
    if value.keys() != set(ROW_FIELDS):
        odd = sorted(map(ascii, value.keys() ^ set(ROW_FIELDS)))
        raise ValueError(f"fields missing or unknown: {', '.join(odd)[:200]}")
    for name in PARTS:
        value[name] = _shared(name, part(name, value[name]))
    for name in NUMBERS:
        value[name] = as_float(value[name])
    row = Row.unchecked(value[name] for name in ROW_FIELDS)
    defect = row_defect(row)
    if defect is not None:
        raise ValueError(defect)
    if given is not None and given != row.content_hash:
        raise ValueError("the content hash does not match: the line was changed or damaged")
    return row
