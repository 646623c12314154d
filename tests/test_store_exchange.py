"""Measurements between machines: the laws of merging, one export per set of rows, hostile lines."""

from __future__ import annotations

import io
import json
import random
import sqlite3
import tempfile
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_places import Databases, execute, stored
from store_samples import CPU, H200, PROBLEM, at, failed, fill, make_row

from autofa.cli import _run
from autofa.device import DeviceKey, limits_of
from autofa.dispatch.evidence import gather
from autofa.dispatch.explanation import Explanation
from autofa.dispatch.ladder import Question, Sources, resolve
from autofa.kernels import REGISTRY
from autofa.settings import Settings
from autofa.store import reader
from autofa.store.codec import MAX_LINE, to_json
from autofa.store.exchange import export_lines, read_database, read_export
from autofa.store.ranking import rank
from autofa.store.rows import Row

HERE = replace(CPU, arch="x86-64-v4")
SHAPES = [
    replace(PROBLEM, device="cpu", dtype="f32", seqlen_q=n, seqlen_k=n, mask=mask)
    for n in (500, 512, 1024)
    for mask in ("none", "causal")
]


def history(seed: int, count: int = 40) -> list[Row]:
    """What tunes at different times may have left, in the order of their insertion."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        run = draw.randrange(5)
        slug = draw.choice(["torch.sdpa", "torch.flash", "torch.unfused", "torch.gone"])
        values: dict[str, Any] = {
            "device": HERE,
            "problem": draw.choice(SHAPES),
            "run": f"run-{run}",
            "provenance": at(run),
            "baseline_call_ms": draw.choice([1.0, 1.1, None]),
        }
        make = failed if draw.random() < 0.1 else make_row
        if make is make_row:
            values["ms"] = draw.choice([0.4, 0.5, 0.505, 1.0, 2.0])
        found.append(make(slug, **values))
    return found


def database(folder: Path, name: str, rows: Iterable[Row]) -> Path:
    return fill(folder / name, *rows)


def export(location: str | Path) -> str:
    return "".join(export_lines(stored(location)))


def parse(text: str | bytes) -> tuple[list[Row], tuple[str, ...]]:
    found = read_export(io.BytesIO(text.encode() if isinstance(text, str) else text))
    return list(found.rows.values()), found.refused


def decisions(location: str | Path, device: DeviceKey) -> list[Explanation]:
    """What the ladder answers for every shape and mode, with every reason it gives."""
    evidence = gather(device, Settings(db=str(location)))
    sources = Sources(REGISTRY, lambda row: "valid", lambda variant: None)
    return [
        resolve(Question(shape, device, limits_of(device), mode), evidence, sources).explanation
        for shape in SHAPES
        for mode in ("eager", "graph")
    ]


@pytest.mark.parametrize("seed", range(3))
def test_an_import_on_an_empty_machine_decides_and_exports_the_same(
    databases: Databases, tmp_path: Path, seed: int
) -> None:
    here = fill(databases(), *history(seed))
    text = export(here)
    rows, refused = parse(text)
    assert refused == ()
    # From a server to a file too: what a machine that serves takes along.
    for there in (databases(), str(tmp_path / "serving.db")):
        fill(there, *rows)
        assert export(there) == text
        assert decisions(there, HERE) == decisions(here, HERE)
        assert any(found.rung == "measured" for found in decisions(there, HERE))


@pytest.mark.parametrize("seed", range(3))
def test_the_order_in_which_rows_came_decides_nothing(databases: Databases, seed: int) -> None:
    rows = history(seed)
    first = fill(databases(), *rows)
    random.Random(seed).shuffle(rows)
    second = fill(databases(), *rows)
    assert export(first) == export(second)
    assert decisions(first, HERE) == decisions(second, HERE)


def test_rows_of_one_run_that_disagree_on_sdpa_are_ranked_in_any_order() -> None:
    rows = [make_row("torch.flash", 0.5), make_row("torch.efficient", 0.5, baseline_call_ms=2.0)]
    assert rank(rows, "eager", REGISTRY) == rank(rows[::-1], "eager", REGISTRY)


POOL = [
    *history(1, 12),
    *(make_row(f"test.kernel-{n}", 1.0 + n, problem=replace(PROBLEM, batch=1 + n)) for n in (1, 2)),
    failed("torch.flash", message="odd: \U0001f600 ' \" \\ \n"),
]
rows_of_a_machine = st.lists(st.sampled_from(POOL), max_size=8)


def merged(folder: Path, *sources: Sequence[Row] | Path) -> Path:
    """A database into which databases (paths) and exports (rows) were merged."""
    found: dict[str, Row] = {}
    for source in sources:
        if isinstance(source, Path):
            part = read_database(str(source))
        else:
            part = read_export(io.BytesIO("".join(export_lines(source)).encode()))
        assert part.refused == ()
        found |= part.rows
    return database(folder, f"{len(list(folder.iterdir()))}.db", found.values())


@given(rows_of_a_machine, rows_of_a_machine, rows_of_a_machine)
@settings(max_examples=8, deadline=None)
def test_merging_is_a_union(a: list[Row], b: list[Row], c: list[Row]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        all_at_once = export(merged(folder, a, b, c))
        hashes = [json.loads(line)["hash"] for line in all_at_once.splitlines()]
        # Nothing lost, nothing doubled, nothing made up.
        assert len(hashes) == len(set(hashes))
        assert set(hashes) == {row.content_hash for row in (*a, *b, *c)}
        # Commutative, associative, idempotent; a database and its export are the same source.
        assert export(merged(folder, c, b, a)) == all_at_once
        left = merged(folder, merged(folder, a, b), c)
        assert export(left) == all_at_once
        assert export(merged(folder, a, merged(folder, b, c))) == all_at_once
        assert export(merged(folder, left, left, b)) == all_at_once


def test_databases_and_exports_of_every_kind_are_merged(
    databases: Databases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = fill(databases(), *POOL[:8]), fill(databases(), *POOL[4:])
    file = fill(tmp_path / "file.db", *POOL[2:6])
    lines = tmp_path / "rows.jsonl"
    assert _run(["db", "export", str(lines), "--db", there]) == 0
    known, new = len(export(here).splitlines()), len({*POOL}) - len({*POOL[:8]})
    for said in (f"{new} new measurements", "0 new measurements"):
        capsys.readouterr()
        assert _run(["db", "merge", str(file), there, str(lines), "--db", here]) == 0
        assert capsys.readouterr().out.startswith(said)
    assert len(export(here).splitlines()) == known + new
    assert set(stored(here)) == {*POOL}
    assert _run(["db", "check", "--db", here]) == 0
    assert f"{len({*POOL})} sound measurements" in capsys.readouterr().out
    other = databases()
    assert _run(["db", "import", str(lines), "--db", other]) == 0
    assert export(other) == export(there)


def changed(**fields: object) -> str:
    """A line with other values, and without the hash that would give them away."""
    found = {**json.loads(to_json(make_row())), **fields}
    del found["hash"]
    return json.dumps(found)


def within(part: str, **fields: object) -> str:
    return changed(**{part: {**json.loads(to_json(make_row()))[part], **fields}})


GOOD = to_json(make_row())
HOSTILE: dict[str, str | bytes] = {
    "no JSON": "rm -rf / #",
    "Python": "__import__('os').system('touch evil')",
    "a pickle": b"cos\nsystem\n(S'touch evil'\ntR.",
    "NaN": GOOD.replace('"time_ms":1.0', '"time_ms":NaN'),
    "infinity": GOOD.replace('"time_ms":1.0', '"time_ms":-Infinity'),
    "overflow": GOOD.replace('"time_ms":1.0', '"time_ms":1e999'),
    "1e308": changed(call_ms=1e308),
    "a denormal": changed(call_ms=5e-324),
    "negative": changed(call_ms=-1.0),
    "zero": changed(call_ms=0.0),
    "a number of 5000 digits": GOOD.replace('"samples":31', '"samples":' + "9" * 5000),
    "a text for a number": changed(time_ms="1.0"),
    "a list for a text": changed(slug=["torch.sdpa"]),
    "an object for a text": changed(status={"ok": 1}),
    "true for a count": changed(samples=True),
    "null": changed(device=None),
    "nothing": changed(slug=""),
    "ok without a time": changed(time_ms=None),
    "an unknown status": changed(status="excellent"),
    "a key twice": GOOD.replace('"time_ms":1.0', '"time_ms":0.1,"time_ms":1.0'),
    "a key twice, deep": GOOD.replace('"units":132', '"units":1,"units":132'),
    "another hash": GOOD.replace('"time_ms":1.0', '"time_ms":0.1'),
    "a hash that is a list": GOOD[: GOOD.index('"hash"')] + '"hash":[1]}',
    "deep lists": "[" * 60_000,
    "deep objects": '{"a":' * 12_000,
    "deep details": within("provenance", details="[" * 15_000),
    "a surrogate": within("provenance", host="\ud800"),
    "a surrogate for a name": within("device", name="\udfff"),
    "a NUL": within("device", name="a\0b"),
    "no UTF-8": GOOD.encode().replace(b"run-1", b"run-\xff"),
    "UTF-16": GOOD.encode("utf-16-le"),
    "a device of another kind": within("device", kind="tpu"),
    "a device of no size": within("device", units=0),
    "a path for a mask": within("problem", mask="../../../etc/passwd"),
    "no rows": within("problem", seqlen_q=0),
    "2**40 rows": within("problem", seqlen_q=2**40),
    "yesterday": within("provenance", created_at="yesterday"),
    "an escape for the terminal": changed(**{"\x1b[2J": 1}),
    "a field too few": "{}",
    "a list": "[]",
    "one character too many": GOOD[:-1] + " " * MAX_LINE + "}",
    "1 MB in one field": within("provenance", host="x" * 2**20),
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_line_is_refused_alone(line: str | bytes) -> None:
    data = line if isinstance(line, bytes) else line.encode("utf-8")
    lines = data.count(b"\n") + 1
    before, after = make_row(), make_row("torch.flash")
    text = b"\n".join([to_json(before).encode(), data, to_json(after).encode()])
    started = time.monotonic()
    rows, refused = parse(text)
    assert time.monotonic() - started < 2
    assert rows == [before, after]
    assert len(refused) == lines
    assert refused[0].startswith("line 2: ")
    for reason in refused:
        assert len(reason) < 400
        assert reason.isprintable()


def test_strings_that_mean_something_elsewhere_stay_strings(tmp_path: Path) -> None:
    texts = [
        "../../../../tmp/evil.so", "'; DROP TABLE autofa_measurement; --", "$(touch evil)",
        "{0.__class__}%s%n", "mma.split_q-d64-m1n1-w99-s9-f32-f16-none", "\x1b[31m\u202e\U0001f600",
    ]  # fmt: skip
    rows = [
        make_row(
            text.encode("ascii", "ignore").decode().replace("\x1b", "?"),
            message=text,
            provenance=replace(at(number), host=text),
            device=replace(HERE, name=text),
            problem=SHAPES[0],
        )
        for number, text in enumerate(texts)
    ]
    text = "".join(export_lines(rows))
    back, refused = parse(text)
    assert (refused, sorted(r.message for r in back)) == ((), sorted(texts))
    path = database(tmp_path, "a.db", back)
    assert export(path) == text
    for row in rows:  # found, and never used: no such kernel is declared
        assert reader.read(path, row.device) == [row]
        found = resolve(
            Question(SHAPES[0], row.device, limits_of(row.device)),
            gather(row.device, Settings(db=str(path))),
            Sources(REGISTRY, lambda row: "no such kernel", lambda variant: None),
        )
        assert found.explanation.kernel != row.slug
    assert not (tmp_path / "evil").exists()


def test_a_line_of_100_mb_is_never_held_whole() -> None:
    class Endless(io.RawIOBase):
        """100 MB without a newline, then a good line; nothing of it exists before it is read."""

        left = 100 << 20
        rest = b"\n" + GOOD.encode()

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
            if self.left:
                size = min(len(buffer), self.left)
                self.left -= size
                buffer[:size] = b"x" * size
                return size
            size = min(len(buffer), len(self.rest))
            buffer[:size], self.rest = self.rest[:size], self.rest[size:]
            return size

    tracemalloc.start()
    try:
        found = read_export(cast("BinaryIO", io.BufferedReader(Endless())))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.refused == (f"line 1: longer than {MAX_LINE} bytes",)
    assert len(found.rows) == 1
    assert peak < 4 << 20


def test_lines_as_other_systems_write_them() -> None:
    other = to_json(make_row("torch.flash"))
    rows, refused = parse(f"\ufeff{GOOD}\r\n\r\n  \n{other}")
    assert (len(rows), refused) == (2, ())


def test_a_row_that_was_changed_in_its_table_is_no_measurement(location: str) -> None:
    fill(location, make_row(), make_row("torch.flash"), make_row("torch.math"))
    execute(location, "UPDATE autofa_measurement SET time_ms = 0.1 WHERE id = 2")
    execute(location, "UPDATE autofa_measurement SET bucket = 'x' WHERE id = 3")
    found = read_database(location)
    assert list(found.rows.values()) == [make_row()]
    assert sorted(reason[:29] for reason in found.refused) == [
        "row 2: the content hash does ", "row 3: bucket is 'x', not 1,8",
    ]  # fmt: skip


def test_a_row_without_its_device_is_not_passed_over(tmp_path: Path) -> None:
    path = database(tmp_path, "a.db", [make_row(), make_row(device=replace(H200, units=7))])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM autofa_device WHERE units = 7")
    found = read_database(str(path))
    assert len(found.rows) == 1
    assert len(found.refused) == 1
