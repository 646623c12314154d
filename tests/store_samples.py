"""Rows for the tests of the store and the report."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from autofa.device import DeviceKey
from autofa.problem import Problem
from autofa.store.reader import sqlite_path
from autofa.store.repository import Repository
from autofa.store.rows import Provenance, Row

Location = TypeVar("Location", str, Path)

H200 = DeviceKey("cuda", "NVIDIA H200", "sm_90", 132, 140)
CPU = DeviceKey("cpu", "Test CPU", "x86-64-v4", 2)
PROVENANCE = Provenance(
    "0.1.0",
    "2.13.0+cu130",
    "13.0",
    "580.1",
    "nvcc 13.0.88",
    "host",
    "2025-11-01T12:00:00+00:00",
    '{"sm_clock_mhz": 1980}',
)
PROBLEM = Problem("f16", 1, 8, 8, 1024, 1024, 64, 64)


def at(minute: int) -> Provenance:
    """The provenance of a run that many minutes later."""
    return replace(PROVENANCE, created_at=f"2025-11-01T12:{minute:02}:00+00:00")


def make_row(slug: str = "torch.sdpa", ms: float | None = 1.0, **fields: Any) -> Row:
    """An ok row that takes `ms` where plain SDPA takes 1 ms; keyword arguments replace fields."""
    values: dict[str, Any] = {
        "device": H200,
        "problem": PROBLEM,
        "slug": slug,
        "family": str(slug).partition("-")[0],
        "fingerprint": "torch==2.13",
        "status": "ok",
        "run": "run-1",
        "time_ms": ms,
        "call_ms": ms,
        "time_spread": 0.01,
        "call_spread": 0.01,
        "time_p10": ms,
        "time_p90": ms,
        "call_p10": ms,
        "call_p90": ms,
        "samples": 31,
        "baseline_time_ms": 1.0,
        "baseline_call_ms": 1.0,
        "error": 1.25e-3,
        "message": "",
        "seconds": 0.5,
        "provenance": PROVENANCE,
    }
    return Row(**{**values, **fields})


def failed(slug: str, status: str = "crashed", **fields: Any) -> Row:
    """A row of a candidate that was not measured, and why."""
    return make_row(slug, None, **{"message": f"it {status}", **fields}, status=status, samples=0)


@cache
def _empty_database() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "autofa.db"
        Repository.open(path, write=True).close()
        return path.read_bytes()


def fill(location: Location, *rows: Row) -> Location:
    """A database with these rows; a file's tables are copied, which is faster than migrating."""
    path = sqlite_path(location)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(_empty_database())
    with Repository.open(location, write=True) as repository:
        repository.add(rows)
    return location
