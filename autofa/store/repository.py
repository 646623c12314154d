"""`Repository`, the only way to write the database, and the full way to read it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Select, exists, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import aliased

from autofa.device import DeviceKey
from autofa.errors import StoreCorruptError, StoreUnwritableError, explain_bad
from autofa.problem import Bucket
from autofa.store import engines, files, migrate
from autofa.store.columns import (
    DEVICE_COLUMNS,
    OWN_COLUMNS,
    SCHEMA,
    Decoder,
    problem_text,
    provenance_text,
    warn_damaged,
)
from autofa.store.models import Device, Measurement, Provenance
from autofa.store.reader import sqlite_path
from autofa.store.rows import Row, device_defect, row_defect

BUSY_TIMEOUT = 30.0
# Rows per statement: what SQLAlchemy holds of each is some times as large as the row.
_AT_ONCE = 5000


@dataclass(frozen=True)
class Audit:
    """Every stored measurement, checked.

    Attributes:
        rows: the sound ones, oldest first.
        damaged: why each of the others is not, with its id in the table.
    """

    rows: tuple[Row, ...]
    damaged: tuple[str, ...]


_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class Repository:
    """The measurements of one database. Open it with `Repository.open`.

    Every call is its own short transaction, so that other processes are never kept waiting; an
    object may be shared between threads, and used after a fork. What a transaction could not do is
    raised as a `StoreError` that never shows a password.

    Attributes:
        where: the database's path, or its URL without user and password.
        moved_aside: the damaged file's new name, where `recover` moved one.
    """

    def __init__(
        self,
        reads: Engine | None,
        writes: Engine | None,
        where: str,
        moved_aside: Path | None = None,
    ) -> None:
        # No engine to read with: a database that does not exist yet, or has no tables.
        self._reads = reads
        self._writes = writes
        self.where = where
        self.moved_aside = moved_aside

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        *,
        write: bool,
        recover: bool = False,
        timeout: float = BUSY_TIMEOUT,
    ) -> Repository:
        """Opens a path or an SQLAlchemy URL.

        For writing, the folder, the file, the tables and their view are made where they are
        missing, and older tables migrated; any number of processes may do so at once. For reading,
        nothing is ever written or made, and a missing or empty file has no rows.

        Args:
            recover: move a damaged file aside (`<name>.corrupt-<UTC time>`) and start a new one.
            timeout: seconds to wait for another writer.

        Raises:
            StoreUnwritableError: it cannot be written there; found out at once.
            StoreCorruptError: the file is damaged (with `recover`, only when reading).
            StoreTooNewError: a newer version wrote it; nothing was changed.
            StoreError: its kind is not supported, its driver is missing, it does not answer.
        """
        path = sqlite_path(location)
        if path is None:
            return cls._open_server(os.fspath(location), write)
        where = str(path)
        if not write:
            found = files.inspect_file(path, timeout, write=False)
            return cls(engines.reading_engine(path, timeout) if found else None, None, where)

        files.check_writable(path)
        aside = None
        try:
            found = files.inspect_file(path, timeout, write=True)
        except StoreCorruptError:
            if not recover:
                raise
            aside = files.move_aside(path, timeout)
            found = files.inspect_file(path, timeout, write=True)
        writes = engines.writing_engine(path, timeout)
        if found != SCHEMA or not files.has_view(path, timeout):
            with engines.translated(where):
                files.grant_wal(path)
                migrate.upgrade(writes, where, path)
        return cls(engines.reading_engine(path, timeout), writes, where, aside)

    @classmethod
    def _open_server(cls, location: str, write: bool) -> Repository:
        engine, where = engines.server_engine(location)
        with ExitStack() as unused, engines.translated(where, engine.url):
            unused.callback(engine.dispose)
            if write:
                migrate.upgrade(engine, where, None)
            else:
                with engine.connect() as connection:
                    if migrate.revision(connection, where) is None:
                        return cls(None, None, where)
            unused.pop_all()
        return cls(engine, engine if write else None, where)

    def __enter__(self) -> Repository:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of all connections; the object can be used no more."""
        for engine in (self._reads, self._writes):
            if engine is not None:
                engine.dispose()

    def add(self, rows: Iterable[Row]) -> int:
        """Stores rows, all or none; those already there, by content hash, are left as they are.

        Returns how many were new.

        Raises:
            ValueError: a row that cannot be a measurement; nothing is stored.
            StoreError: the database refused.
        """
        batch = list(rows)
        for row in batch:
            defect = row_defect(row)
            if defect is not None:
                raise ValueError(f"row of {row.slug!r:.80}: {defect}")
        if not batch:
            return 0
        if self._writes is None:
            raise StoreUnwritableError(
                explain_bad(f"database {self.where}", "opened for reading", "writing", "reopen it")
            )
        with self._translated(), self._writes.begin() as connection:
            migrate.one_writer(connection)
            ids = _Ids(connection)
            return sum(
                _insert(connection, [_values(row, ids) for row in batch[start : start + _AT_ONCE]])
                for start in range(0, len(batch), _AT_ONCE)
            )

    def rows(
        self,
        device: DeviceKey | None = None,
        bucket: Bucket | None = None,
        ok_only: bool = False,
    ) -> list[Row]:
        """Stored rows, oldest first; damaged ones are left out, and said once in the log.

        Args:
            ok_only: only what may be dispatched: ok, and contradicted by no later failure of the
                same kernel in the same bucket.
        """
        query = _select()
        if device is not None:
            for name in DEVICE_COLUMNS:
                query = query.where(getattr(Device, name) == getattr(device, name))
        if bucket is not None:
            query = query.where(Measurement.bucket == str(bucket), Device.kind == bucket.device)
        if ok_only:
            query = query.where(Measurement.status == "ok", _not_contradicted())
        records = self._fetch(query.order_by(Measurement.id))
        width = len(DEVICE_COLUMNS)
        keys = [record[:width] for record in records]
        decoders = {key: Decoder(DeviceKey(*key)) for key in set(keys)}
        found = [
            row
            for key, record in zip(keys, records, strict=True)
            for row in decoders[key].rows([record[width:]])
        ]
        warn_damaged(sum(decoder.damaged for decoder in decoders.values()), self.where)
        return found

    def audit(self) -> Audit:
        """Reads everything, and holds each row against its content hash and its bucket.

        Raises:
            StoreError: the database refused.
        """
        own = (Measurement.id, Measurement.content_hash, Measurement.bucket)
        # Outer joins: a measurement whose device or provenance is gone is not to be passed over.
        records = self._fetch(_select(outer=True).add_columns(*own).order_by(Measurement.id))
        width = len(DEVICE_COLUMNS)
        decoders: dict[object, Decoder] = {}
        rows, damaged = [], []
        for record in records:
            key, fields = record[:width], record[width:-3]
            number, content_hash, bucket = record[-3:]
            decoder = decoders.setdefault(key, Decoder(DeviceKey(*key)))
            found = decoder.rows([fields])
            if not found:
                reason = decoder.defect(fields)
            elif found[0].content_hash != content_hash:
                reason = "the content hash does not match: the row was changed or damaged"
            elif str(found[0].bucket) != bucket:
                reason = f"bucket is {bucket!a:.60}, not {found[0].bucket}"
            else:
                rows += found
                continue
            damaged.append(f"row {number}: {reason}")
        return Audit(tuple(rows), tuple(damaged))

    def devices(self) -> list[DeviceKey]:
        """The devices that have rows, in order."""
        query = select(*(getattr(Device, name) for name in DEVICE_COLUMNS))
        found = (DeviceKey(*record) for record in self._fetch(query))
        return sorted(key for key in found if device_defect(key) is None)

    def _fetch(self, query: Select[Any]) -> list[tuple[Any, ...]]:
        if self._reads is None:
            return []
        with self._translated(), self._reads.connect() as connection:
            return [tuple(record) for record in connection.execute(query)]

    def _translated(self) -> AbstractContextManager[None]:
        url = self._reads.url if self._reads is not None else None
        is_file = url is None or url.get_backend_name() == "sqlite"
        return engines.translated(self.where, None if is_file else url)


class _Ids:
    """Ids of devices and provenances, inserted where missing. Lives within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._found: dict[tuple[type, tuple[object, ...]], int] = {}

    def device(self, row: Row) -> int:
        values = {name: getattr(row.device, name) for name in DEVICE_COLUMNS}
        return self._id(Device, values, values)

    def provenance(self, row: Row) -> int:
        document = provenance_text(row.provenance)
        digest = {"digest": hashlib.sha256(document.encode("ascii")).hexdigest()}
        return self._id(Provenance, digest, {"document": document, **digest})

    def _id(
        self,
        table: type[Device] | type[Provenance],
        key: dict[str, Any],
        values: dict[str, Any],
    ) -> int:
        known = (table, tuple(key.values()))
        if known not in self._found:
            insert = _INSERTS[self._connection.dialect.name]
            self._connection.execute(insert(table).values(**values).on_conflict_do_nothing())
            query = select(table.id).filter_by(**key)
            self._found[known] = self._connection.execute(query).scalar_one()
        return self._found[known]


def _insert(connection: Connection, values: list[dict[str, Any]]) -> int:
    """Inserts what is not there; how many rows that were."""
    insert = _INSERTS[connection.dialect.name](Measurement).on_conflict_do_nothing()
    if connection.dialect.name == "postgresql":  # its driver counts no rows of a batch
        return len(connection.execute(insert.returning(Measurement.id), values).all())
    return int(connection.execute(insert, values).rowcount)


def _values(row: Row, ids: _Ids) -> dict[str, Any]:
    return {
        "content_hash": row.content_hash,
        "device_id": ids.device(row),
        "provenance_id": ids.provenance(row),
        "created_at": row.provenance.created_at,
        "bucket": str(row.bucket),
        "problem": problem_text(row.problem),
        **{name: getattr(row, name) for name in OWN_COLUMNS},
    }


def _select(outer: bool = False) -> Select[Any]:
    devices = [getattr(Device, name) for name in DEVICE_COLUMNS]
    own = [getattr(Measurement, name) for name in OWN_COLUMNS]
    shared = (Measurement.problem, Measurement.created_at, Provenance.document)
    return (
        select(*devices, *shared, *own)
        .join_from(Measurement, Device, isouter=outer)
        .join(Provenance, Measurement.provenance_id == Provenance.id, isouter=outer)
    )


def _not_contradicted() -> ColumnElement[bool]:
    # The same words as the view `autofa_dispatch`.
    failure, later = aliased(Measurement), aliased(Measurement)
    kernel = ("device_id", "bucket", "slug", "fingerprint")
    repaired = exists().where(
        *(getattr(later, name) == getattr(failure, name) for name in (*kernel, "problem")),
        later.status == "ok",
        later.created_at > failure.created_at,
    )
    standing = select(*(getattr(failure, name) for name in kernel)).where(
        failure.status.not_in(("ok", "pruned")), ~repaired
    )
    return tuple_(*(getattr(Measurement, name) for name in kernel)).not_in(standing)
