"""Shipped measurements: the exact device, nothing absurd, quickly."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest
from store_samples import CPU, H200, PROBLEM, at, failed, make_row

from autofa.kernels import REGISTRY
from autofa.resources import db_dir
from autofa.store.ranking import rank
from autofa.store.rows import Row
from autofa.store.seeds import best_of, read_seed, seed_path, seed_text

RAGGED = replace(PROBLEM, seqlen_q=1000, seqlen_k=1000)
ROWS = [
    make_row(),
    make_row("torch.flash", 0.1 + 0.2, error=None),
    make_row("torch.flash", 1 / 3, problem=RAGGED, provenance=at(2)),
    failed("torch.cudnn", "wrong_result", message="off by | 1\n"),
]


def key(row: Row) -> str:
    return row.content_hash


def write(folder: Path, *rows: Row) -> Path:
    path = seed_path(rows[0].device, folder)
    path.write_text(seed_text(rows))
    return path


def test_rows_come_back_exactly(tmp_path: Path) -> None:
    assert write(tmp_path, *ROWS).name == "nvidia-h200.jsonl"
    assert sorted(read_seed(H200, tmp_path), key=key) == sorted(ROWS, key=key)


def test_the_text_does_not_depend_on_the_order_of_rows() -> None:
    assert seed_text(ROWS) == seed_text(ROWS[::-1])


@pytest.mark.parametrize(
    "other",
    [
        {"name": "NVIDIA H200 NVL"},
        {"name": "nvidia-h200"},  # the same file, another name
        {"name": "NVIDIA H200 "},
        {"arch": "sm_90a"},
        {"units": 16},
        {"memory_gib": 70},
    ],
    ids=str,
)
def test_only_the_exact_device_is_served(tmp_path: Path, other: dict[str, object]) -> None:
    write(tmp_path, *ROWS)
    assert read_seed(replace(H200, **other), tmp_path) == []


def test_devices_of_one_name_share_a_file(tmp_path: Path) -> None:
    smaller = replace(H200, memory_gib=70)
    theirs = [replace(row, device=smaller) for row in ROWS[:2]]
    write(tmp_path, *ROWS, *theirs)
    assert sorted(read_seed(smaller, tmp_path), key=key) == sorted(theirs, key=key)
    assert len(read_seed(H200, tmp_path)) == len(ROWS)


def test_no_file_no_rows(tmp_path: Path) -> None:
    assert read_seed(H200, tmp_path) == []
    assert read_seed(replace(CPU, name="../../etc/passwd"), tmp_path) == []
    assert seed_path(replace(CPU, name="../../x"), tmp_path).parent == tmp_path
    seed_path(H200, tmp_path).mkdir()
    assert read_seed(H200, tmp_path) == []


def test_bad_lines_do_not_hide_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, make_row())
    lines = path.read_text().splitlines()
    nan = lines[-1].replace("1.0", "NaN", 1)
    absurd = lines[-1].replace("1.0", "-1e300", 1)
    path.write_text(
        "\n".join(
            [
                lines[-1],  # before any device: skipped
                *lines,
                "{bad",
                nan,
                absurd,
                "[1, 2]",
                "7",
                '{"problem": {"dtype": "f16"}}',
                lines[-1],  # its problem is bad
                '{"surprise": {}}',
                '{"device": {}}',
                lines[-1],  # of no device
                *lines[:2],
                "[" * 20000,
            ]
        )
    )
    with caplog.at_level(logging.WARNING):
        assert read_seed(H200, tmp_path) == [make_row()]
    (record,) = caplog.records
    assert "nvidia-h200.jsonl: 10 lines were left out; first: entry " in record.message


def test_a_file_that_is_no_text_is_no_seed(tmp_path: Path) -> None:
    seed_path(H200, tmp_path).write_bytes(bytes(range(256)) * 10)
    assert read_seed(H200, tmp_path) == []


def test_a_giant_file_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with seed_path(H200, tmp_path).open("wb") as file:
        file.truncate(1 << 30)
    assert read_seed(H200, tmp_path) == []
    assert "not read" in caplog.text


def test_three_thousand_rows_are_read_quickly(tmp_path: Path) -> None:
    rows = [
        make_row(f"test.kernel-{i}", 1.0 + i / 7, problem=replace(PROBLEM, batch=1 << i % 8))
        for i in range(3000)
    ]
    write(tmp_path, *rows)
    costs = []
    for _ in range(5):
        start = time.process_time()
        found = read_seed(H200, tmp_path)
        costs.append(time.process_time() - start)
    assert len(found) == 3000
    # 20 ms on a quiet core.
    assert min(costs) < 0.1


def test_only_the_best_few_are_shipped() -> None:
    rows = [make_row(ms=2.0)]
    rows += [make_row(f"test.kernel-{i:02}", 1.0 + i / 10) for i in range(20)]
    rows += [failed("test.kernel-90"), make_row("test.kernel-00", 9.0, provenance=at(0))]
    kept = best_of(rows, keep=3)
    assert {row.slug for row in kept} == {
        "torch.sdpa", "test.kernel-00", "test.kernel-01", "test.kernel-02",
    }  # fmt: skip
    assert rank(kept, "eager", REGISTRY)[0].slug == rank(rows, "eager", REGISTRY)[0].slug


@pytest.mark.parametrize(
    "path", sorted((db_dir() / "seed").glob("*.jsonl")), ids=lambda path: path.name
)
def test_shipped_seeds_are_sound(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    devices = {
        tuple(value["device"].items())
        for value in map(json.loads, path.read_text().splitlines())
        if isinstance(value, dict) and "device" in value
    }
    assert devices
    for fields in devices:
        device = replace(H200, **dict(fields))
        assert seed_path(device) == path
        rows = read_seed(device)
        assert rows
        assert {row.status for row in rows} == {"ok"}
        assert any(row.slug == "torch.sdpa" for row in rows)
    assert not caplog.records
