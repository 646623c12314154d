"""Measurements on their way between machines: exports as JSON lines, and what merges hold.

An export is a function of its rows alone: one line each, in an order that no history changes. What
comes in is not trusted: a line is bounded before it is parsed, and refused alone.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from autofa.errors import StoreUnwritableError, UsageError, explain_bad
from autofa.store.codec import MAX_LINE, from_json, to_json
from autofa.store.repository import Repository
from autofa.store.rows import Row

_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True)
class Found:
    """What a source holds.

    Attributes:
        rows: by content hash, so each once.
        refused: what is no measurement: where, and why.
    """

    rows: dict[str, Row]
    refused: tuple[str, ...] = ()


def export_lines(rows: Iterable[Row]) -> Iterator[str]:
    """The lines of an export, each with its newline: by device, time and content hash."""
    ordered = sorted(rows, key=lambda r: (r.device, r.provenance.created_at, r.content_hash))
    return (f"{to_json(row)}\n" for row in ordered)


def read_export(stream: BinaryIO) -> Found:
    """The measurements of an export; empty lines are passed over."""
    rows: dict[str, Row] = {}
    refused: list[str] = []
    for number, line in enumerate(_lines(stream), 1):
        try:
            if line is None:
                raise ValueError(f"line {number}: longer than {MAX_LINE} bytes")
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                row = from_json(text, number)
                rows.setdefault(row.content_hash, row)
        except UnicodeDecodeError:
            refused.append(f"line {number}: not UTF-8")
        except ValueError as error:
            refused.append(str(error))
    return Found(rows, tuple(refused))


def _lines(stream: BinaryIO) -> Iterator[bytes | None]:
    """Lines of at most `MAX_LINE` bytes; None for a longer one, which is never held whole."""
    while line := stream.readline(MAX_LINE + 1):
        if len(line) <= MAX_LINE or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE)
        yield None


def check_source(name: str, supported: str) -> None:
    """Whether a file can be read from, before any work is done.

    Raises:
        UsageError: it cannot.
    """
    # Not opened here: a pipe can be opened only once.
    if "\0" in name or Path(name).is_dir() or not os.access(name, os.R_OK):
        raise UsageError(explain_bad("FILE", name, supported, "name a file that can be read"))


def is_database(path: Path) -> bool:
    """Whether a file begins as SQLite's do; what is no file never does."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except (OSError, ValueError):
        return False


def read_database(location: str) -> Found:
    """The measurements of a database.

    Raises:
        StoreError: it cannot be read.
    """
    with Repository.open(location, write=False) as source:
        found = source.audit()
    return Found({row.content_hash: row for row in found.rows}, found.damaged)


def check_target(path: Path) -> None:
    """Whether an export may be written there.

    Raises:
        UsageError: it is a database, a directory, or in a folder that is not there.
    """
    supported, do = "a file to write", "name another"
    if is_database(path):
        raise UsageError(explain_bad("FILE", f"{path}, a database", supported, do))
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise UsageError(explain_bad("FILE", str(path), supported, do))


def write_lines(lines: Iterable[str], path: Path) -> None:
    """Writes an export whole or not at all; into a pipe or device, as it comes.

    Raises:
        StoreUnwritableError: the disk is full, or the file cannot be made.
    """
    target = path.resolve()
    whole = not target.exists() or target.is_file()
    place = target.with_name(f"{target.name}.partial-{os.getpid()}") if whole else target
    try:
        with place.open("w", encoding="ascii", newline="") as file:
            file.writelines(lines)
            if whole:
                file.flush()
                os.fsync(file.fileno())
        if whole:
            place.replace(target)
    except OSError as error:
        do = f"name another file ({error.strerror})"
        raise StoreUnwritableError(explain_bad("FILE", str(path), "a writable file", do)) from None
    finally:
        if whole:
            with suppress(OSError):
                place.unlink(missing_ok=True)
