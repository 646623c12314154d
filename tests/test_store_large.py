"""Large database files, whose buckets are read one at a time."""

from __future__ import annotations

import random
import sqlite3
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from store_samples import CPU, H200, PROBLEM, at, fill, make_row

from autofa.problem import Bucket
from autofa.store import large, reader
from autofa.store.ranking import newest
from autofa.store.rows import Row

SHAPES = [replace(PROBLEM, batch=b, seqlen_q=n) for b in (1, 2) for n in (64, 65, 66, 512)]


@pytest.fixture(autouse=True)
def always_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "LEAST_BYTES", 0)


def by_bucket(rows: Sequence[Row]) -> dict[Bucket, set[Row]]:
    found: dict[Bucket, set[Row]] = {}
    for row in rows:
        found.setdefault(row.bucket, set()).add(row)
    return found


def opened(path: Path) -> large.LargeFile:
    found = large.open_large(path, H200)
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_bucket_has_what_the_whole_file_has_for_it(tmp_path: Path, seed: int) -> None:
    """Of the newest rows; failures contradict, and are contradicted, in both ways of reading."""
    draw = random.Random(seed)
    rows = [
        make_row(
            slug := draw.choice(("torch.sdpa", "test.a", "test.b", "test.c")),
            None if (bad := draw.random() < 0.1) else 1.0 + draw.random(),
            status="crashed" if bad else "ok",
            problem=draw.choice(SHAPES),
            device=draw.choice((H200, H200, replace(H200, units=131))),
            fingerprint=f"{slug}-{draw.randrange(2)}",
            run=f"run-{number % 40}",
            provenance=at(draw.randrange(20)),
        )
        for number in range(300)
    ]
    path = fill(tmp_path / "autofa.db", *rows)
    whole = by_bucket(newest(reader.read(path, H200)))
    found = opened(path)
    for bucket in {row.bucket for row in rows}:
        kept = found.get(bucket, ())
        assert set(newest(kept)) == whole.get(bucket, set())
        assert len(kept) <= 4 * len(SHAPES)
    assert set(found) >= set(whole)


def test_another_device_and_another_bucket_have_no_rows(tmp_path: Path) -> None:
    path = fill(tmp_path / "autofa.db", make_row())
    other = large.open_large(path, CPU)
    assert other is not None
    assert (len(other), list(other)) == (0, [])
    found = opened(path)
    assert list(found) == [make_row().bucket]
    assert replace(PROBLEM, batch=64) not in found  # type: ignore[comparison-overlap]
    assert found.get(replace(make_row().bucket, batch=64)) is None


def test_what_is_wrong_with_a_file_is_left_to_the_whole_reading(tmp_path: Path) -> None:
    assert large.open_large(tmp_path / "missing.db", H200) is None
    path = fill(tmp_path / "autofa.db", make_row())
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE autofa_alembic_version SET version_num = '9999'")
    assert large.open_large(path, H200) is None
    path.write_bytes(b"no database" * 999)
    assert large.open_large(path, H200) is None
    path.write_bytes(b"")
    assert large.open_large(path, H200) is None


def test_a_file_that_breaks_later_costs_its_rows_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = fill(tmp_path / "autofa.db", make_row())
    found = opened(path)
    path.write_bytes(b"no database" * 999)
    assert found.get(make_row().bucket) is None
    assert "cannot be read" in caplog.text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="sqlite3 has no limits")
@pytest.mark.parametrize("change", ["message = ?", "time_ms = -length(?)"])
def test_a_damaged_row_costs_itself(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["torch.sdpa", *(f"test.kernel-{i}" for i in range(20))]
    path = fill(tmp_path / "autofa.db", *map(make_row, names))
    with closing(sqlite3.connect(path)) as connection, connection:
        query = f"UPDATE autofa_measurement SET {change} WHERE slug = 'test.kernel-3'"
        connection.execute(query, ("x" * 10**7,))
    began = time.process_time()
    found = opened(path)[make_row().bucket]
    assert time.process_time() - began < 0.5
    assert [row.slug for row in found] == [name for name in names if name != "test.kernel-3"]
    assert "1 damaged rows" in caplog.text


def test_many_rows_do_not_slow_a_bucket(tmp_path: Path) -> None:
    """A row of another bucket is never looked at, and an old one not whole."""
    path = fill(tmp_path / "autofa.db", make_row())
    columns = "device_id, provenance_id, created_at, problem, slug, family, fingerprint, status"
    rest = "time_ms, call_ms, samples, baseline_time_ms, baseline_call_ms, message, seconds"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 60000)"
            f" INSERT INTO autofa_measurement (content_hash, bucket, run, {columns}, {rest})"
            " SELECT i, CASE WHEN i % 100 THEN '64,8,' || (16 << i % 9) || ',64 f16 none'"
            f" ELSE m.bucket END, i, {columns}, {rest} FROM n, autofa_measurement m"
        )
    began = time.process_time()
    found = opened(path)
    assert make_row().bucket in found
    assert len(found) == 10
    assert time.process_time() - began < 0.1  # the whole file takes 0.9 s
