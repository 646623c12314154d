"""The database, and what its rows are worth on the devices that are here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autofa.compiler import fingerprint, library_of
from autofa.device import DeviceKey, Limits, limits_of
from autofa.diagnosis.finding import Finding, info, of_error, ok, problem
from autofa.dispatch.ladder import Evidence, Question, Sources, resolve
from autofa.errors import StoreError, StoreLockedError, UsageError
from autofa.kernels import REGISTRY
from autofa.kernels.family import Variant
from autofa.problem import Bucket
from autofa.settings import Settings, database, without_secrets
from autofa.store.ranking import is_valid, validity
from autofa.store.reader import sqlite_path
from autofa.store.rows import Row
from autofa.store.seeds import read_seed
from autofa.store.survey import Survey, is_writable, survey


@dataclass(frozen=True)
class Measured:
    """What the database says of the devices that are here.

    Attributes:
        rows: None where it could not be read.
        findings: about the database itself.
    """

    rows: tuple[Row, ...] | None
    findings: tuple[Finding, ...]


def read(settings: Settings, devices: tuple[DeviceKey, ...]) -> Measured:
    """Reads the database. Neither writes it nor makes anything beside it."""
    location = database(settings)
    where = without_secrets(location)
    try:
        path = sqlite_path(location)
        found = _server(location, devices) if path is None else survey(path, devices)
    except StoreError as error:
        return Measured(None, (_of_store_error(error),))
    return Measured(found.rows, tuple(_of_survey(found, path, where)))


def _of_store_error(error: StoreError) -> Finding:
    found = of_error("database", error)
    if isinstance(error, StoreLockedError):
        cure = "wait for the process that holds it, or end it: `fuser` with that path names it"
        return problem("database", f"{found.found}: its rows are not used", cure)
    return problem("database", f"{found.found}: its rows are not used", found.cure)


def _server(location: str, devices: tuple[DeviceKey, ...]) -> Survey:
    from autofa.store.repository import Repository

    with Repository.open(location, write=False) as repository:
        rows = [row for key in devices for row in repository.rows(key, ok_only=True)]
        total = sum(len(repository.rows(key, ok_only=True)) for key in repository.devices())
        return Survey("of a server", total, tuple(rows))


def _of_survey(found: Survey, path: Path | None, where: str) -> Iterator[Finding]:
    if path is not None and not path.exists() and not is_writable(path):
        yield problem(
            "database",
            f"{where}: not there, and cannot be made",
            "name a file in a folder that you can write with AUTOFA_DB",
        )
        return
    if path is not None and not path.exists():
        yield info("database", f"{where}: not there yet", "`autofa tune` makes it")
    elif found.revision is None:
        yield info("database", f"{where}: empty", "`autofa tune` fills it")
    else:
        schema = f"schema {found.revision}" if path is not None else "a server"
        yield ok(
            "database",
            f"{where}: {schema}, {found.total} measurements, {len(found.rows)} of the devices here",
        )
    if path is not None and not is_writable(path):
        yield info(
            "database",
            f"{where}: can be read only; no tune can add to it",
            "to tune here, name a file that you can write with AUTOFA_DB",
        )


@dataclass(frozen=True)
class Standing:
    """What the measurements of one device are worth.

    Attributes:
        valid: rows that may be used; `outlived` are those that may not any more.
        buckets: kinds of call that were measured.
        missing: kernels that would be the fastest somewhere, and whose library is not there.
        shipped: rows of the seed that came with autofa.
    """

    device: DeviceKey
    valid: int
    outlived: int
    buckets: int
    missing: tuple[str, ...]
    shipped: int

    @property
    def to_build(self) -> str:
        """Why something has to be compiled for this device; empty if nothing has to."""
        if self.missing:
            return f"needed for {len(self.missing)} of the fastest kernels on {self.device}"
        return "" if self.valid else f"needed to tune {self.device}"


def standing(device: DeviceKey, rows: tuple[Row, ...], settings: Settings) -> Standing:
    """Asks the ladder what it makes of the rows of `device`."""
    own = [row for row in rows if row.device == device]
    limits = _limits(device)
    seeds = read_seed(device)
    buckets: dict[Bucket, list[Row]] = {}
    for row in own:
        buckets.setdefault(row.bucket, []).append(row)
    judge = cache(lambda row: validity(row, REGISTRY, fingerprint))
    sources = Sources(
        REGISTRY, judge, lambda variant: library_of(variant, variant.target(limits), settings)
    )
    evidence = Evidence(lambda bucket: buckets.get(bucket, ()), lambda bucket: ())
    wanted: dict[str, Variant] = {}
    for bucket in buckets:
        asked = Question(bucket.problem, device, limits, precision=settings.precision)
        decision = resolve(asked, evidence, sources)
        if decision.wanted is not None:
            wanted[decision.wanted.slug] = decision.wanted
    valid = sum(is_valid(judge(row)) for row in own)
    return Standing(
        device, valid, len(own) - valid, len(buckets), tuple(sorted(wanted)), len(seeds)
    )


def _limits(device: DeviceKey) -> Limits:
    try:
        return limits_of(device)
    except UsageError:  # a GPU from before all that own kernels run on
        return Limits(device.kind, device.arch, 0, units=device.units)


def standing_findings(found: Standing) -> Iterator[Finding]:
    where = found.device
    name = "cpu" if where.kind == "cpu" else "cuda"
    tune = f"`autofa tune --gpu-profile quick --device {name}` measures it in minutes"
    if found.shipped:
        yield ok("kernels", f"{where}: {found.shipped} measurements of it came with autofa")
    if not found.valid and found.outlived:
        yield problem(
            "kernels",
            f"{where}: none of its {found.outlived} measurements holds any more (kernels or torch "
            "have changed since)",
            tune,
        )
        return
    if not found.valid:
        yield info("kernels", f"{where}: nothing is measured", tune)
        return
    yield ok(
        "kernels", f"{where}: {found.valid} measurements, {found.buckets} kinds of calls answered"
    )
    if found.outlived:
        yield info("kernels", f"{where}: {found.outlived} measurements hold no more", tune)
    if found.missing:
        first = ", ".join(found.missing[:3]) + (" ..." if len(found.missing) > 3 else "")
        yield info(
            "kernels",
            f"{where}: {len(found.missing)} of the fastest kernels are not built: {first}",
            "`autofa.warmup()` builds them at once; else each is built behind the first call of it",
        )
