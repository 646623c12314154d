"""Database and cache as dispatch meets them: damaged, locked, newer, another's, out of date."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dispatch_world import (
    assert_close,
    built,
    flash,
    inputs,
    no_defaults,
    problem,
    reference,
    row,
    stale,
    store,
    tuned,
)
from runtime_variants import require_runtime

import autofa
from autofa import settings
from autofa.compiler import cache
from autofa.device import DeviceKey
from autofa.dispatch import state
from autofa.runtime import devices, extension

SHAPE = problem("1,2,33,16")


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> None:
    require_runtime()


@pytest.fixture(autouse=True)
def _fresh(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.WARNING, logger="autofa")
    built(flash())
    state.reload()
    with torch.no_grad(), no_defaults():
        yield
    state.reload()


def own() -> int:
    return extension.counters()["own"]


# ---- faults: right answers, one warning, the file as it was ----


def truncated(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE autofa_alembic_version SET version_num = '9999'")
    connection.close()


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def foreign(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE other (x)")
    connection.close()


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), ""),
    "empty": (lambda path: path.write_bytes(b""), ""),
    "noise": (lambda path: path.write_bytes(bytes(range(256)) * 16), "database"),
    "truncated": (truncated, "database"),
    "newer": (newer, "9999"),
    "directory": (directory, "directory"),
    "foreign": (foreign, "other programs' tables"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_database_faults(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    path = store(tuned(SHAPE))
    for side in ("-wal", "-shm"):
        path.with_name(path.name + side).unlink(missing_ok=True)
    damage, said = FAULTS[fault]
    damage(path)
    before = path.read_bytes() if path.is_file() else None
    for n in (33, 5, 70):
        for causal in (False, True):
            q, k, v = inputs(problem(f"1,2,{n},16"))
            got = autofa.attention(q, k, v, is_causal=causal)
            assert_close(got, reference(q, k, v, is_causal=causal))
    messages = [r.message for r in caplog.records]
    assert len(messages) == (1 if said else 0), messages
    if said:
        assert said in messages[0]
        assert str(path) in messages[0]
        assert said in autofa.explain(*inputs(SHAPE)).reason
    after = path.read_bytes() if path.is_file() else None
    assert after == before
    assert state.STATE.table is not None
    assert state.STATE.table.counts.reads == 1


def test_a_mended_database_is_used_after_reload() -> None:
    path = store(tuned(SHAPE))
    good = path.read_bytes()
    truncated(path)
    state.reload()
    q, k, v = inputs(SHAPE)
    before = own()
    autofa.attention(q, k, v)
    path.write_bytes(good)
    autofa.reload()
    autofa.attention(q, k, v)
    assert own() == before + 1


def test_a_read_only_database_is_read() -> None:
    path = store(tuned(SHAPE))
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        before = own()
        autofa.attention(*inputs(SHAPE))
    finally:
        path.parent.chmod(0o755)
    assert own() == before + 1


def test_a_locked_database_costs_a_moment_once(caplog: pytest.LogCaptureFixture) -> None:
    path = store(tuned(SHAPE))
    with sqlite3.connect(path, isolation_level=None) as writer:
        writer.execute("PRAGMA journal_mode=DELETE")
        writer.execute("BEGIN EXCLUSIVE")
        for n in (33, 70):
            q, k, v = inputs(problem(f"1,2,{n},16"))
            assert_close(autofa.attention(q, k, v), reference(q, k, v))
        writer.execute("ROLLBACK")
    writer.close()
    assert len(caplog.records) == 1
    assert "lock" in caplog.records[0].message


def test_a_server_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AUTOFA_DB", "postgresql://user:secret@127.0.0.1:1/db")
    state.reload()
    for n in (33, 70):
        q, k, v = inputs(problem(f"1,2,{n},16"))
        assert_close(autofa.attention(q, k, v), reference(q, k, v))
    assert state.STATE.table is not None
    assert state.STATE.table.wait(20)
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text


# ---- whose rows count ----


def others() -> dict[str, DeviceKey]:
    mine = devices.device_key("cpu")
    return {
        "other threads": replace(mine, units=mine.units + 62),
        "longer name": replace(mine, name=mine.name + " NVL"),
        "other case": replace(mine, name=mine.name.swapcase()),
        "trailing space": replace(mine, name=mine.name + " "),
        "other memory": replace(mine, memory_gib=18),
        "other isa": replace(mine, arch=mine.arch + "+extra"),
    }


@pytest.mark.parametrize("name", list(others()))
def test_rows_of_another_device_do_not_count(name: str) -> None:
    other = others()[name]
    store([replace(made, device=other) for made in tuned(SHAPE)])
    before = own()
    autofa.attention(*inputs(SHAPE))
    assert own() == before
    found = autofa.explain(*inputs(SHAPE))
    assert found.rung == "sdpa"
    assert "autofa tune" in found.reason


def test_the_number_of_threads_is_part_of_the_device() -> None:
    threads = torch.get_num_threads()
    if threads == 1:
        pytest.skip("one thread only")
    store(tuned(SHAPE))
    before = own()
    torch.set_num_threads(1)
    try:
        autofa.attention(*inputs(SHAPE))
        assert own() == before
    finally:
        torch.set_num_threads(threads)
    autofa.attention(*inputs(SHAPE))
    assert own() == before + 1


@pytest.mark.parametrize("kind", ["sources", "unknown", "out of range", "torch"])
def test_rows_that_outlived_what_they_measured(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = tuned(SHAPE)
    other = problem("1,2,70,16")
    if kind == "sources":
        rows[0] = stale(rows[0])
    elif kind == "torch":
        rows = [stale(row("torch.flash", SHAPE, 0.2)), rows[1]]
    else:
        slug = {"unknown": "gone.kernel-x2", "out of range": "cpu.flash-v4-k99q9-b7-f32"}[kind]
        rows[0] = replace(rows[0], slug=slug)
    store([*rows, *tuned(other)])
    before = own()
    q, k, v = inputs(SHAPE)
    assert_close(autofa.attention(q, k, v), reference(q, k, v))
    assert own() == before
    note = autofa.explain(q, k, v).candidates[-1]
    assert (note.kernel, note.status) == (rows[0].slug, "stale")
    autofa.attention(*inputs(other))  # the other rows stay
    assert own() == before + 1
    assert not caplog.records


@pytest.mark.parametrize("damage", ["truncated", "a pipe"])
def test_a_damaged_library_is_rebuilt_behind_and_never_loaded(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    library = built(flash())
    monkeypatch.setenv("AUTOFA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "native_dir", lambda: tmp_path)
    place = cache.directory(settings.load(), library.parent.name)
    shutil.copytree(library.parent, place)
    place.chmod(0o700)
    if damage == "truncated":
        with (place / library.name).open("r+b") as file:
            file.truncate(5000)
    else:
        (place / library.name).unlink()
        os.mkfifo(place / library.name)
    store(tuned(SHAPE))
    q, k, v = inputs(SHAPE)
    table = state.STATE.table
    assert table is not None
    before = own()
    for _ in range(3):
        assert_close(autofa.attention(q, k, v), reference(q, k, v))
    assert table.wait(60)
    assert_close(autofa.attention(q, k, v), reference(q, k, v))
    assert own() > before
    assert cache.damage(place / library.name) is None
    assert sum(r.levelno >= logging.WARNING for r in caplog.records) <= 1
