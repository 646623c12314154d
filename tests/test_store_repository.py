"""The database by itself: round trips, the reader's contract, migrations, hostile content."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_places import Databases, clear, engine_of, execute, is_file, read, tables
from store_samples import CPU, H200, PROBLEM, PROVENANCE, at, failed, fill, make_row

from autofa.device import DeviceKey
from autofa.errors import StoreError, StoreUnwritableError
from autofa.kernels import REGISTRY
from autofa.problem import bucket_of
from autofa.resources import db_dir
from autofa.store import columns, migrate, reader
from autofa.store.models import Base
from autofa.store.ranking import is_valid, rank, validity
from autofa.store.repository import Repository
from autofa.store.rows import Row

RAGGED = replace(PROBLEM, seqlen_q=1000, seqlen_k=1000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new folder %41?#" / "autofa.db"


def sql(path: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement, values).fetchall()


def test_rows_come_back_exactly(location: str) -> None:
    rows = [
        make_row(),
        failed("torch.flash", message="odd: \0 \udc80 \U0001f600 ' \" ; --"),
        make_row("torch.cudnn", 0.1 + 0.2, error=None, problem=RAGGED, provenance=at(3)),
        make_row("cpu.x", device=CPU, problem=replace(PROBLEM, device="cpu", dtype="f32")),
    ]
    with Repository.open(location, write=True) as repository:
        assert repository.add(rows) == 4
        assert repository.rows() == rows
        assert [row.content_hash for row in repository.rows()] == [r.content_hash for r in rows]
        assert repository.devices() == sorted([CPU, H200])
        assert repository.rows(device=CPU) == rows[3:]
        assert repository.rows(bucket=bucket_of(PROBLEM)) == rows[:3]
        assert repository.rows(device=H200, ok_only=True) == [rows[0], rows[2]]
    with Repository.open(location, write=False) as repository:
        assert repository.rows() == rows


def test_adding_again_changes_nothing(location: str) -> None:
    rows = [make_row(), make_row("torch.flash")]
    with Repository.open(location, write=True) as repository:
        assert repository.add(rows) == 2
        assert repository.add([*rows, make_row("torch.cudnn"), *rows]) == 1
        assert repository.add([]) == 0
        assert len(repository.rows()) == 3


def test_a_batch_with_an_impossible_row_is_refused_whole(location: str) -> None:
    with Repository.open(location, write=True) as repository:
        with pytest.raises(ValueError, match="time_p90"):
            repository.add([make_row(), make_row("torch.flash", time_p90=float("nan"))])
        assert repository.rows() == []


def test_a_repository_opened_for_reading_does_not_write(location: str) -> None:
    fill(location, make_row())
    with (
        Repository.open(location, write=False) as repository,
        pytest.raises(StoreUnwritableError, match="opened for reading"),
    ):
        repository.add([make_row("torch.flash")])


OTHERS: list[dict[str, Any]] = [
    {"name": "NVIDIA H200 NVL"},
    {"name": "NVIDIA H200 MIG 1g.18gb", "units": 16},
    {"name": "nvidia h200"},
    {"name": "NVIDIA H200 "},
    {"name": "NVIDIA H_00"},
    {"name": "NVIDIA H%"},
    {"arch": "sm_90a"},
    {"units": 16},
    {"memory_gib": 141},
]


def test_a_device_is_matched_exactly(location: str) -> None:
    fill(location, make_row())
    assert read(location, H200) == [make_row()]
    with Repository.open(location, write=False) as repository:
        for other in OTHERS:
            key = replace(H200, **other)
            assert read(location, key) == []
            assert repository.rows(device=key) == []


kernels = st.sampled_from(["torch.sdpa", "torch.flash"])
histories = st.lists(
    st.builds(
        lambda slug, ok, problem, minute, device, fingerprint: make_row(
            slug,
            1.0 if ok else None,
            status="ok" if ok else "crashed",
            problem=replace(problem, device=device.kind),
            provenance=at(minute),
            device=device,
            fingerprint=fingerprint,
        ),
        kernels,
        st.booleans(),
        st.sampled_from([PROBLEM, RAGGED, replace(PROBLEM, batch=2)]),
        st.integers(0, 4),
        st.sampled_from([H200, CPU]),
        st.sampled_from(["torch==2.12", "torch==2.13"]),
    ),
    max_size=12,
)


@given(rows=histories)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_dispatch_is_given_what_the_repository_gives(location: str, rows: list[Row]) -> None:
    fill(location)
    clear(location)
    fill(location, *rows)
    with Repository.open(location, write=False) as repository:
        for device in (H200, CPU):
            found = read(location, device)
            assert found == repository.rows(device=device, ok_only=True)
            # What the view leaves out, ranking all of the rows leaves out too.
            for fingerprint in ("torch==2.12", "torch==2.13"):
                every = [r for r in repository.rows(device=device) if r.fingerprint == fingerprint]
                left = [r for r in found if r.fingerprint == fingerprint]
                for bucket in {row.bucket for row in every}:
                    whole, part = (
                        rank([r for r in some if r.bucket == bucket], "eager", REGISTRY)
                        for some in (every, left)
                    )
                    assert whole == part


def test_the_reader_is_light(path: Path) -> None:
    fill(path, make_row())
    code = (
        "import sys; from autofa.store import reader; from autofa.device import DeviceKey;"
        f"rows = reader.read({str(path)!r}, {H200!r});"
        "heavy = {'sqlalchemy', 'alembic', 'torch', 'click', 'optuna'} & set(sys.modules);"
        "sys.exit(f'{len(rows)} rows, {heavy}' if heavy or len(rows) != 1 else 0)"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_two_thousand_rows_are_read_quickly(path: Path) -> None:
    rows = [
        make_row(f"test.kernel-{i}", 1.0 + i, problem=replace(PROBLEM, batch=1 << i % 8))
        for i in range(2000)
    ]
    fill(path, *rows)
    assert reader.read(path, H200) == rows
    costs = []
    for _ in range(5):
        start = time.process_time()
        reader.read(path, H200)
        costs.append(time.process_time() - start)
    # The design allows a process 100 ms of start-up; on a quiet core this takes about 15.
    assert min(costs) < 0.08


def test_migrations_and_models_agree(location: str) -> None:
    Repository.open(location, write=True).close()
    engine = engine_of(location)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": columns.VERSION_TABLE, "compare_type": True}
        )
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()
    assert all(table.startswith("autofa_") for table, _ in tables(location))


def test_the_schema_is_the_newest_migration() -> None:
    assert ScriptDirectory(str(db_dir() / "migrations")).get_heads() == [columns.SCHEMA]


def test_an_older_file_is_copied_and_migrated(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, make_row())
    folder = tmp_path / "migrations"
    (folder / "versions").mkdir(parents=True)
    for name in ("env.py", "versions/0001_measurements.py"):
        (folder / name).write_text((db_dir() / "migrations" / name).read_text())
    (folder / "versions" / "0002_next.py").write_text(
        "from alembic import op\nrevision = '0002'\ndown_revision = '0001'\n"
        "def upgrade():\n    op.execute('CREATE TABLE autofa_next (id INTEGER)')\n"
    )
    for module in (columns, migrate):
        monkeypatch.setattr(module, "SCHEMA", "0002")
    monkeypatch.setattr("autofa.store.repository.SCHEMA", "0002")
    monkeypatch.setattr(migrate, "db_dir", lambda: tmp_path)
    with Repository.open(path, write=True) as repository:
        assert repository.rows() == [make_row()]
    assert sql(path, "SELECT version_num FROM autofa_alembic_version") == [("0002",)]
    (copy,) = path.parent.glob("autofa.db.0001-*Z")
    assert sql(copy, "SELECT version_num FROM autofa_alembic_version") == [("0001",)]
    assert reader.read(copy, H200) == [make_row()]


def test_another_programs_tables_are_left_alone(path: Path) -> None:
    path.parent.mkdir()
    sql(path, "CREATE TABLE alembic_version (version_num TEXT)")
    sql(path, "INSERT INTO alembic_version VALUES ('v9.future')")
    for reading in (lambda: reader.read(path, H200), lambda: Repository.open(path, write=False)):
        with pytest.raises(StoreError, match="other programs' tables"):
            reading()
    fill(path, make_row())
    assert not list(path.parent.glob("*.corrupt-*"))
    assert reader.read(path, H200) == [make_row()]
    assert sql(path, "SELECT version_num FROM alembic_version") == [("v9.future",)]


MEASUREMENT = [
    "time_ms = 'fast'",
    "time_ms = NULL",
    "call_ms = -1",
    "call_spread = 9e999",
    "samples = 'many'",
    "created_at = 'yesterday'",
    "slug = x'00ff'",
    "run = CAST(x'ff' AS TEXT)",
    "problem = '0,8,1024,64 f16 none'",
    "problem = '1,8,long,64 f16 none'",
    "problem = '1,8,99999999999999999999,64 f16 none'",
    "problem = '1,8/8,1024,64 f16 none'",
    "problem = '1,8,1024,64 float16 none'",
    "problem = '1,8,1024,64 f16 diagonal'",
    "problem = '1,8,1024,64 f16 none grad grad'",
    "problem = '1,8,1024,64 f16'",
    "problem = x'00ff'",
    "problem = 7",
]
PROVENANCES = [
    "document = '{bad'",
    "document = '[]'",
    "document = '{\"torch\": 1}'",
    "document = replace(document, '{}', '{bad')",
    "document = CAST(x'ff' AS TEXT)",
    "document = 7",
]
DAMAGE = [
    *(f"UPDATE autofa_measurement SET {change} WHERE slug = 'bad'" for change in MEASUREMENT),
    *(
        f"UPDATE autofa_provenance SET {change} WHERE document LIKE '%bad%'"
        for change in PROVENANCES
    ),
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda text: text[14:60])
def test_a_damaged_row_does_not_hide_the_others(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = [make_row(), make_row("torch.flash")]
    bad = make_row("bad", provenance=replace(PROVENANCE, host="bad", details="{}"))
    fill(path, good[0], bad, good[1])
    sql(path, damage)
    with caplog.at_level(logging.WARNING):
        assert reader.read(path, H200) == good
        with Repository.open(path, write=False) as repository:
            assert repository.rows() == good
    assert [record.message for record in caplog.records].count(
        f"{path}: 1 damaged rows were left out"
    ) == 2


HOSTILE = [
    "../../../../tmp/evil.so",
    "/etc/passwd",
    "$(touch evil)",
    "'; DROP TABLE autofa_measurement; --",
    "%s%n{0.__class__}",
    "mma.split_q-d64-m64n64-w4-s1-f16-none\0",
    "torch.sdpa' OR '1'='1",
]


# What a server's types let happen too.
ANYWHERE = [
    "UPDATE autofa_measurement SET time_ms = NULL WHERE slug = 'bad'",
    "UPDATE autofa_measurement SET call_ms = -1 WHERE slug = 'bad'",
    "UPDATE autofa_measurement SET created_at = 'yesterday' WHERE slug = 'bad'",
    "UPDATE autofa_measurement SET problem = '1,8,long,64 f16 none' WHERE slug = 'bad'",
    "UPDATE autofa_provenance SET document = '{bad' WHERE document LIKE '%bad%'",
    "UPDATE autofa_provenance SET document = '[]' WHERE document LIKE '%bad%'",
]


def test_damage_on_a_server_or_in_a_file_costs_its_own_row(
    databases: Databases, caplog: pytest.LogCaptureFixture
) -> None:
    good = [make_row(), make_row("torch.flash")]
    bad = make_row("bad", provenance=replace(PROVENANCE, host="bad", details="{}"))
    location = fill(databases(), good[0], bad, good[1])
    for damage in ANYWHERE:
        clear(location)
        fill(location, good[0], bad, good[1])
        execute(location, damage)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert read(location, H200) == good
            with Repository.open(location, write=False) as repository:
                assert repository.rows() == good
                assert len(repository.audit().damaged) == 1
        assert [r.message.endswith("1 damaged rows were left out") for r in caplog.records] == [
            True,
            True,
        ]


@pytest.mark.parametrize("text", HOSTILE)
def test_stored_strings_are_only_data(location: str, text: str) -> None:
    if not is_file(location):
        text = text.replace("\0", "")  # which a server's texts cannot hold
    device = DeviceKey("cuda", text.replace("\0", ""), "sm_90", 132, 140)
    row = make_row(device=device, message=text)
    fill(location, make_row(), row)
    change = "UPDATE autofa_measurement SET slug = :text, family = :text WHERE message != ''"
    execute(location, change, text=text)
    found = [*read(location, device), *read(location, H200)]
    assert make_row() in found
    for odd in found:
        answer = validity(odd, REGISTRY, lambda variant, target: "")
        assert odd == make_row() or not is_valid(answer)
    assert len(execute(location, "SELECT id FROM autofa_measurement")) == 2


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("postgresql://u:secret@127.0.0.1:1/db", "postgresql://127.0.0.1:1/db"),
        ("postgres://u:secret@h/db?password=secret", "postgresql://h/db"),
        ("postgresql://u:secret@h:port/db", "a postgresql URL"),
        ("mysql://u:secret@h/db", "scheme: got 'mysql'; supported: a path, sqlite:///FILE"),
        ("htp://u:secret@h/db", "got 'htp'"),
        ("sqlite://", "name a file"),
        (":memory:", "name a file"),
        ("", "name a file"),
        ("a\0b", "name a file"),
    ],
)
@pytest.mark.parametrize("write", [True, False])
def test_a_url_that_cannot_be_used_says_why_without_its_password(
    location: str, said: str, write: bool
) -> None:
    with pytest.raises(StoreError) as raised:
        Repository.open(location, write=write)
    shown: BaseException | None = raised.value
    assert said in str(shown)
    while shown is not None:
        assert "secret" not in str(shown)
        shown = shown.__cause__
    if "://" in location and not location.startswith("sqlite"):
        with pytest.raises(StoreError, match="SQLite files"):
            reader.read(location, H200)


def test_an_sqlite_url_is_a_path(path: Path) -> None:
    with Repository.open(f"sqlite:///{path.parent.parent}/url.db", write=True) as repository:
        repository.add([make_row()])
    assert reader.read(path.parent.parent / "url.db", H200) == [make_row()]
