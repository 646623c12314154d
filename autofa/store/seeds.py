"""Measurements that ship with autofa, one file per GPU; db/seed/README.md has the format."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from autofa.device import DeviceKey
from autofa.kernels import REGISTRY, Registry
from autofa.kernels.vendor import BASELINE
from autofa.problem import Problem
from autofa.resources import db_dir
from autofa.store.codec import as_float, load_strict, part
from autofa.store.columns import OWN_COLUMNS
from autofa.store.ranking import group, rank
from autofa.store.rows import (
    NUMBERS,
    Provenance,
    Row,
    device_defect,
    document,
    own_defect,
    problem_defect,
    provenance_defect,
)

MAX_BYTES = 16 * 1024 * 1024
_NUMBERS = tuple(OWN_COLUMNS.index(name) for name in NUMBERS)
_Part = TypeVar("_Part", DeviceKey, Problem, Provenance)
_log = logging.getLogger("autofa.store")


def seed_path(device: DeviceKey, folder: Path | None = None) -> Path:
    """Where the seed of a GPU of this name is, if there is one: `nvidia-h200.jsonl`."""
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    return (folder or db_dir() / "seed") / f"{name[:100] or 'unnamed'}.jsonl"


def read_seed(device: DeviceKey, folder: Path | None = None) -> list[Row]:
    """The shipped rows of exactly this device; [] where there are none.

    The file is found by name, but a row counts only where the device inside the file is equal in
    every field. Never raises for what a file holds: bad lines are left out, and said once.
    """
    path = seed_path(device, folder)
    try:
        if path.stat().st_size > MAX_BYTES:
            _log.warning("%s: larger than %d bytes, not read", path.name, MAX_BYTES)
            return []
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return []
    rows, refused = _parse(text, device)
    if refused:
        _log.warning("%s: %d lines were left out; first: %s", path.name, len(refused), refused[0])
    return rows


def seed_text(rows: Iterable[Row]) -> str:
    """The content of a seed file with these rows, in an order that makes for small diffs."""
    lines: list[str] = []
    said: dict[str, object] = {}

    def say(name: str, value: object, fields: object) -> None:
        if said.get(name) != value:
            said[name] = value
            lines.append(json.dumps({name: fields}, allow_nan=False))

    for (device, _), found in group(rows).items():
        if said.get("device") != device:  # which makes a reader forget the rest
            said.clear()
        for row in sorted(found, key=lambda r: (r.problem, r.provenance.created_at, r.slug)):
            fields = document(row)
            say("device", device, fields["device"])
            say("provenance", row.provenance, fields["provenance"])
            say("problem", row.problem, fields["problem"])
            lines.append(json.dumps([fields[name] for name in OWN_COLUMNS], allow_nan=False))
    return "".join(f"{line}\n" for line in lines)


def best_of(rows: Iterable[Row], registry: Registry = REGISTRY, keep: int = 8) -> list[Row]:
    """The rows worth shipping: per bucket those of the best few of either mode, and SDPA's."""
    kept: list[Row] = []
    for found in group(rows).values():
        slugs = {BASELINE}
        ranked = rank(found, "eager", registry), rank(found, "graph", registry)
        for places in ranked:
            slugs |= {place.slug for place in places[:keep]}
        kept += [row for place in ranked[0] if place.slug in slugs for row in place.rows]
    return kept


def _values(text: str) -> Iterable[tuple[int, object]]:
    lines = text.splitlines()
    try:
        # One call for the whole file: a call per line takes twice the time.
        yield from enumerate(load_strict("[" + ",".join(filter(None, lines)) + "]"), 1)
    except ValueError:
        for number, line in enumerate(lines, 1):
            try:
                yield number, load_strict(line)
            except ValueError as error:
                yield number, error


def _parse(text: str, device: DeviceKey) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    refused: list[str] = []
    here = False
    problem: Problem | None = None
    provenance: Provenance | None = None
    for number, value in _values(text):
        try:
            if isinstance(value, list):
                if here:
                    rows.append(_row(device, problem, provenance, value))
            elif not isinstance(value, dict) or len(value) != 1:
                raise ValueError(str(value)[:80])
            elif "device" in value:
                here, problem, provenance = False, None, None
                here = _checked(DeviceKey(**part("device", value["device"]))) == device
            elif "provenance" in value:
                provenance = None
                provenance = _checked(Provenance(**part("provenance", value["provenance"])))
            else:
                problem = None
                problem = _checked(Problem(**part("problem", value.get("problem"))))
        except ValueError as error:
            refused.append(f"entry {number}: {error}")
    return rows, refused


def _checked(value: _Part) -> _Part:
    if isinstance(value, DeviceKey):
        defect = device_defect(value)
    elif isinstance(value, Problem):
        defect = problem_defect(value)
    else:
        defect = provenance_defect(value)
    if defect is not None:
        raise ValueError(defect)
    return value


def _row(
    device: DeviceKey, problem: Problem | None, provenance: Provenance | None, own: list[object]
) -> Row:
    if problem is None or provenance is None:
        raise ValueError("a row before its problem and provenance")
    if len(own) != len(OWN_COLUMNS):
        raise ValueError(f"{len(own)} values, not {len(OWN_COLUMNS)}")
    for index in _NUMBERS:
        own[index] = as_float(own[index])
    row = Row.unchecked((device, problem, *own, provenance))
    defect = own_defect(row)
    if defect is not None:
        raise ValueError(defect)
    return row
