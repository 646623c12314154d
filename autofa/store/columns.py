"""The columns of the view `autofa_dispatch`, and how a record of them becomes a `Row`.

The reader and the repository both select these columns and decode them here. What a file holds is
not trusted: a record that cannot be a measurement is refused alone, whatever its neighbours are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from autofa.device import DeviceKey
from autofa.errors import StoreTooNewError, explain_bad
from autofa.problem import Problem
from autofa.store.rows import (
    ROW_FIELDS,
    Provenance,
    Row,
    device_defect,
    own_defect,
    problem_defect,
    provenance_defect,
)

# The schema that this version writes: the newest revision under db/migrations/versions.
SCHEMA = "0001"
VERSION_TABLE = "autofa_alembic_version"

DEVICE_COLUMNS = ("kind", "name", "arch", "units", "memory_gib")
PROBLEM_COLUMNS = (
    "dtype", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v",
    "mask", "dropout", "needs_grad",
)  # fmt: skip
PROVENANCE_COLUMNS = ("autofa", "torch", "cuda", "driver", "compiler", "host", "details")
# Everything else of a row, in the order of its fields.
OWN_COLUMNS = tuple(n for n in ROW_FIELDS if n not in ("device", "problem", "provenance"))
# What a decoder is given of a row whose device is known.
RECORD_COLUMNS = (*PROBLEM_COLUMNS, "created_at", *PROVENANCE_COLUMNS, *OWN_COLUMNS)
_PROVENANCE = len(PROBLEM_COLUMNS)
_OWN = _PROVENANCE + 1 + len(PROVENANCE_COLUMNS)

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


class Decoder:
    """Turns records of one device into rows. One per query; not shared between threads.

    Problems and provenances repeat over many records, so each is built and checked once.
    """

    def __init__(self, device: DeviceKey) -> None:
        self.damaged = 0
        self._device = device
        self._sound = device_defect(device) is None
        self._problems: dict[tuple[object, ...], Problem | None] = {}
        self._provenances: dict[tuple[object, ...], Provenance | None] = {}

    def rows(self, records: Iterable[tuple[object, ...]]) -> list[Row]:
        """The rows of records of `RECORD_COLUMNS`, less those that cannot be a measurement.

        Those are counted in `damaged`.
        """
        found = []
        for record in records:
            problem = self._problem(record[:_PROVENANCE])
            provenance = self._provenance(record[_PROVENANCE:_OWN])
            if self._sound and problem is not None and provenance is not None:
                row = Row.unchecked((self._device, problem, *record[_OWN:], provenance))
                if own_defect(row) is None:
                    found.append(row)
                    continue
            self.damaged += 1
        return found

    def _problem(self, key: tuple[object, ...]) -> Problem | None:
        if key not in self._problems:
            *shape, mask, dropout, needs_grad = key
            kind = self._device.kind
            found = Problem(*shape, mask, kind, bool(dropout), bool(needs_grad))  # type: ignore[arg-type, call-arg]
            self._problems[key] = None if problem_defect(found) else found
        return self._problems[key]

    def _provenance(self, key: tuple[object, ...]) -> Provenance | None:
        if key not in self._provenances:
            created_at, *versions, details = key
            found = Provenance(*versions, created_at, details)  # type: ignore[arg-type, call-arg]
            self._provenances[key] = None if provenance_defect(found) else found
        return self._provenances[key]


def warn_damaged(count: int, where: str) -> None:
    """Says once how many records were left out."""
    if count:
        _log.warning("%s: %d damaged rows were left out", where, count)
