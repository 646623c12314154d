"""The columns of the view `autofa_dispatch`, and how a record of them becomes a `Row`.

The reader and the repository both select these columns and decode them here. What a file holds is
not trusted: a record that cannot be a measurement is refused alone, whatever its neighbours are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

from autofa.device import DeviceKey
from autofa.errors import StoreTooNewError, UsageError, explain_bad
from autofa.problem import Problem, parse_shape
from autofa.store.rows import (
    PARTS,
    ROW_FIELDS,
    Provenance,
    Row,
    device_defect,
    own_defect,
    provenance_defect,
)

# The schema that this version writes: the newest revision under db/migrations/versions.
SCHEMA = "0001"
VERSION_TABLE = "autofa_alembic_version"
TABLES = ("autofa_device", "autofa_provenance", "autofa_measurement")
VIEW = "autofa_dispatch"

DEVICE_COLUMNS = ("kind", "name", "arch", "units", "memory_gib")
device_values = attrgetter(*DEVICE_COLUMNS)
# Everything of a row but its device, problem and provenance, in the order of its fields.
OWN_COLUMNS = tuple(n for n in ROW_FIELDS if n not in ("device", "problem", "provenance"))
# What a decoder is given. Problem and provenance are one text each: 17 columns fewer cut the time
# that SQLite takes to hand over 2,000 rows from 14 to 9 ms.
RECORD_COLUMNS = ("problem", "created_at", "provenance", *OWN_COLUMNS)
_VERSIONS = tuple(n for n in PARTS["provenance"] if n != "created_at")

_log = logging.getLogger("autofa.store")


def is_newer(revision: object) -> bool:
    """Whether a file of this revision was written by a newer version than this one."""
    known = isinstance(revision, str) and revision.isascii() and revision.isdigit()
    return not known or int(str(revision)) > int(SCHEMA)


def too_new(revision: object, where: str) -> StoreTooNewError:
    return StoreTooNewError(
        explain_bad(
            f"database {where}",
            f"schema {revision}",
            f"schemas up to {SCHEMA}",
            "install the newer autofa that wrote it, or name another file with --db or AUTOFA_DB",
        )
    )


def problem_text(problem: Problem) -> str:
    """A problem as one text, e.g. `1,8,1024,64 f16 causal`; `read_problem` is its inverse."""
    flags = " dropout" * problem.dropout + " grad" * problem.needs_grad
    return f"{problem.shape} {problem.dtype} {problem.mask}{flags}"


def read_problem(text: object, device: str) -> Problem | None:
    """The problem that `problem_text` wrote; None for any other text."""
    words = text.split(" ") if isinstance(text, str) else []
    if len(words) < 3:
        return None
    try:
        plain = parse_shape(words[0], dtype=words[1], mask=words[2], device=device)
    except UsageError:
        return None
    found = replace(plain, dropout="dropout" in words[3:], needs_grad="grad" in words[3:])
    return found if problem_text(found) == text else None


def provenance_text(provenance: Provenance) -> str:
    """A provenance less its time as one JSON object; `read_provenance` is its inverse."""
    return json.dumps({name: getattr(provenance, name) for name in _VERSIONS})


def read_provenance(text: object, created_at: object) -> Provenance | None:
    """The provenance that `provenance_text` wrote; None for any other text."""
    try:
        fields = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.keys() != set(_VERSIONS):
        return None
    found = Provenance(created_at=created_at, **fields)  # type: ignore[arg-type]
    return found if provenance_defect(found) is None else None


class Decoder:
    """Turns records of one device into rows. One per query; not shared between threads.

    Problems and provenances repeat over many records, so each is read and checked once.
    """

    def __init__(self, device: DeviceKey) -> None:
        self.damaged = 0
        self._device = device
        self._sound = device_defect(device) is None
        self._problems: dict[object, Problem | None] = {}
        self._provenances: dict[tuple[object, object], Provenance | None] = {}

    def rows(self, records: Iterable[tuple[object, ...]]) -> list[Row]:
        """The rows of records of `RECORD_COLUMNS`, less those that cannot be a measurement.

        Those are counted in `damaged`.
        """
        found = []
        for shape, created_at, versions, *own in records:
            problem = self._problem(shape)
            provenance = self._provenance(versions, created_at)
            if self._sound and problem is not None and provenance is not None:
                row = Row.unchecked((self._device, problem, *own, provenance))
                if own_defect(row) is None:
                    found.append(row)
                    continue
            self.damaged += 1
        return found

    def defect(self, record: tuple[object, ...]) -> str | None:
        """Why `rows` leaves a record out; None if it does not."""
        shape, created_at, versions, *own = record
        problem = self._problem(shape)
        provenance = self._provenance(versions, created_at)
        if not self._sound:
            return device_defect(self._device)
        if problem is None:
            return f"problem is {shape!a:.60}"
        if provenance is None:
            return f"provenance of {created_at!a:.40} is {versions!a:.60}"
        return own_defect(Row.unchecked((self._device, problem, *own, provenance)))

    def _problem(self, text: object) -> Problem | None:
        if text not in self._problems:
            self._problems[text] = read_problem(text, self._device.kind)
        return self._problems[text]

    def _provenance(self, text: object, created_at: object) -> Provenance | None:
        key = (text, created_at)
        if key not in self._provenances:
            self._provenances[key] = read_provenance(text, created_at)
        return self._provenances[key]


def warn_damaged(count: int, where: str) -> None:
    """Says once how many records were left out."""
    if count:
        _log.warning("%s: %d damaged rows were left out", where, count)
