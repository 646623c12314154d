"""A file with more rows than a first call can wait for: its buckets are read one by one.

A row costs 15 us to read, so 100,000 took a first call 1.5 s. Of a bucket only what the ranking
looks at is read whole: the newest row of each kernel at each shape.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autofa.device import DeviceKey
from autofa.problem import Bucket, bucket_of
from autofa.store.columns import (
    DEVICE_COLUMNS,
    OWN_COLUMNS,
    VERSION_TABLE,
    Decoder,
    device_values,
    is_newer,
    read_problem,
)
from autofa.store.reader import bounded, connect, lenient_text, present, sqlite_path
from autofa.store.rows import Row

# About 4,000 rows of anybody, which are read in 60 ms.
LEAST_BYTES = 2 << 20
# No profile has a tenth of it, and the buckets around one are looked for among all of them.
_MOST_BUCKETS = 4096

_DEVICE = (
    f"SELECT id FROM autofa_device WHERE {' AND '.join(f'{name} = ?' for name in DEVICE_COLUMNS)}"
)
# From one bucket to the next through the index, past all rows between.
_NEXT = "SELECT min(bucket) FROM autofa_measurement WHERE device_id = ?1"
_BUCKETS = (
    f"WITH RECURSIVE found(bucket) AS ({_NEXT} UNION ALL"
    f" SELECT ({_NEXT} AND bucket > found.bucket) FROM found WHERE found.bucket IS NOT NULL"
    f" LIMIT {_MOST_BUCKETS}) SELECT bucket FROM found WHERE bucket IS NOT NULL"
)
_MARKS = (
    "SELECT id, problem, slug, fingerprint, status, created_at FROM autofa_measurement"
    " WHERE device_id = ? AND bucket = ? AND typeof(created_at) = 'text'"
)
_ROW = (
    "SELECT m.problem, m.created_at, p.document,"
    f" {', '.join(f'm.{name}' for name in OWN_COLUMNS)} FROM autofa_measurement m"
    " JOIN autofa_provenance p ON p.id = m.provenance_id WHERE m.id = ?"
)

_log = logging.getLogger("autofa.store")


class LargeFile(Mapping[Bucket, Sequence[Row]]):
    """The rows of one device that may be dispatched, by bucket. Any thread.

    Iterating gives the buckets as they were when it was opened; a bucket that cannot be read later
    has no rows, and the log says so.
    """

    def __init__(self, path: Path, device: DeviceKey, number: int, names: Sequence[str]) -> None:
        self._path = path
        self._device = device
        self._number = number
        problems = (read_problem(name, device.kind) for name in names)
        self._buckets = dict.fromkeys(bucket_of(p) for p in problems if p is not None)
        self._read: dict[Bucket, list[Row]] = {}

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    def __getitem__(self, bucket: Bucket) -> Sequence[Row]:
        found = self._read.get(bucket)
        if found is None:
            try:
                found = self._select(bucket)
            except sqlite3.Error as error:
                _log.warning("%s: bucket %s cannot be read: %s", self._path, bucket, error)
                found = []
            self._read[bucket] = found
        if not found:
            raise KeyError(bucket)
        return found

    def _select(self, bucket: Bucket) -> list[Row]:
        decoder = Decoder(self._device)
        connection = connect(self._path, 0.1)
        connection.text_factory = lenient_text
        records: list[tuple[object, ...]] = []
        try:
            with bounded(connection):
                marks = connection.execute(_MARKS, (self._number, str(bucket))).fetchall()
                for number in dispatchable(marks):
                    try:
                        records += connection.execute(_ROW, (number,)).fetchall()
                    except sqlite3.DataError:  # a text of 100 MB
                        decoder.damaged += 1
        finally:
            connection.close()
        found = decoder.rows(records)
        if decoder.damaged:
            _log.warning("%s: %d damaged rows were left out", self._path, decoder.damaged)
        return found


def dispatchable(marks: Sequence[tuple[Any, ...]]) -> list[int]:
    """Ids of the newest ok rows of one bucket, per shape and kernel, of what no later failure of
    the same kernel contradicts: what the view gives, less what is older.

    Args:
        marks: id, problem, slug, fingerprint, status, created_at of all its rows.
    """
    proved: dict[tuple[object, ...], str] = {}
    for _, problem, slug, fingerprint, status, created_at in marks:
        if status == "ok":
            key = problem, slug, fingerprint
            proved[key] = max(created_at, proved.get(key, ""))
    contradicted = {
        (slug, fingerprint)
        for _, problem, slug, fingerprint, status, created_at in marks
        if status not in ("ok", "pruned")
        and proved.get((problem, slug, fingerprint), "") <= created_at
    }
    last: dict[tuple[object, ...], str] = {}
    for (problem, slug, fingerprint), created_at in proved.items():
        if (slug, fingerprint) not in contradicted:
            last[problem, slug] = max(created_at, last.get((problem, slug), ""))
    return [
        number
        for number, problem, slug, fingerprint, status, created_at in sorted(marks)
        if status == "ok"
        and (slug, fingerprint) not in contradicted
        and created_at == last[problem, slug]
    ]


def open_large(location: str | os.PathLike[str], device: DeviceKey) -> LargeFile | None:
    """A file that is large; None for any other, and for one with which something is wrong: the
    whole way of reading says what.

    Raises:
        StoreError: as `reader.read`.
    """
    path = sqlite_path(location)
    if path is None or not present(path) or path.stat().st_size < LEAST_BYTES:
        return None
    try:
        connection = connect(path, 0.1)
        try:
            with bounded(connection):
                (revision,) = connection.execute(f"SELECT * FROM {VERSION_TABLE}").fetchone()
                if is_newer(revision):
                    return None
                found = connection.execute(_DEVICE, device_values(device)).fetchone()
                number = -1 if found is None else found[0]
                names = [name for (name,) in connection.execute(_BUCKETS, (number,))]
        finally:
            connection.close()
    except (sqlite3.Error, TypeError):
        return None
    return LargeFile(path, device, number, names)
