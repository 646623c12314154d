"""`autofa db check | export | import | merge`: what reaches which stream, and the exit codes."""

from __future__ import annotations

import io
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from store_samples import CPU, H200, PROBLEM, at, failed, fill, make_row

from autofa.cli import _run
from autofa.store import reader
from autofa.store.codec import to_json
from autofa.store.repository import Repository
from autofa.store.seeds import read_seed

ROWS = [make_row(), make_row("torch.flash", 0.5, provenance=at(2)), failed("torch.cudnn")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The database in use, which AUTOFA_DB names."""
    return tmp_path / "autofa.db"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = _run(["db", *arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def content(folder: Path) -> dict[str, bytes]:
    return {
        p.name: p.read_bytes() for p in folder.iterdir() if not p.name.endswith(("-wal", "-shm"))
    }


def test_an_export_goes_through_a_pipe_and_comes_out_the_same(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, *ROWS)
    code, text, err = run(capsys, "export")
    assert (code, err) == (0, "")
    assert len(text.splitlines()) == 3
    for line in text.splitlines():
        found = json.loads(line)
        assert set(found["provenance"]) >= {"torch", "driver", "compiler", "host", "created_at"}
        assert len(found["hash"]) == 64
    other = str(path.with_name("other.db"))
    for said in ("3 new measurements, 0 known already\n", "0 new measurements, 3 known already\n"):
        stdin(monkeypatch, text)
        assert run(capsys, "import", "-", "--db", other) == (0, said, "")
    assert run(capsys, "export", "-", "--db", other) == (0, text, "")
    file = path.with_name("rows.jsonl")
    assert run(capsys, "export", str(file)) == (0, "", "")
    assert file.read_text() == text


def test_a_seed_is_made_by_export(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cpu = make_row(device=CPU, problem=replace(PROBLEM, device="cpu"))
    fill(path, *ROWS, cpu)
    folder = path.with_name("seed")
    folder.mkdir()
    file = str(folder / "nvidia-h200.jsonl")
    for options in ([], ["--device", "NVIDIA H200"]):
        assert run(capsys, "export", "--seed", file, *options) == (0, "", "")
        assert {row.slug for row in read_seed(H200, folder)} == {"torch.sdpa", "torch.flash"}
    assert "Test CPU" not in Path(file).read_text()
    assert run(capsys, "export", "--device", str(CPU)) == (0, f"{to_json(cpu)}\n", "")
    code, out, err = run(capsys, "export", "--device", "H200")
    assert (code, out) == (2, "")
    assert "NVIDIA H200, Test CPU" in err


def test_refused_lines_are_told_and_the_others_kept(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [to_json(row) for row in ROWS]
    file = path.with_name("rows.jsonl")
    file.write_text("\n".join([lines[0], "{bad", lines[1], lines[2].replace("0.5", "0.25")]))
    code, out, err = run(capsys, "import", str(file))
    assert (code, out) == (3, "2 new measurements, 0 known already\n")
    said = err.splitlines()
    assert said[0].startswith(f"{file}: line 2: Expecting property name")
    assert said[1] == (
        f"{file}: line 4: the content hash does not match: the line was changed or damaged"
    )
    assert said[2:] == ["2 refused"]
    assert reader.read(path, H200) == ROWS[:2]


def test_a_file_of_garbage_is_not_repeated_line_by_line(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = path.with_name("garbage")
    file.write_bytes(b"\x1b[31m\xff\n" * 5000)
    code, out, err = run(capsys, "import", str(file))
    assert (code, out) == (3, "0 new measurements, 0 known already\n")
    assert len(err.splitlines()) == 101
    assert err.splitlines()[-1] == "5000 refused"
    assert "\x1b" not in err


def test_merge_takes_databases_exports_and_stdin(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = path.parent / "sources"
    fill(folder / "a.db", *ROWS[:2])
    (folder / "b.jsonl").write_text(f"{to_json(ROWS[1])}\n{to_json(ROWS[2])}\n")
    (folder / "empty").touch()
    before = content(folder)
    stdin(monkeypatch, to_json(make_row("torch.efficient")))
    files = [str(folder / name) for name in ("a.db", "b.jsonl", "empty")]
    code, out, err = run(capsys, "merge", *files, "-", f"sqlite:///{folder}/a.db")
    assert (code, out, err) == (0, "4 new measurements, 0 known already\n", "")
    assert content(folder) == before
    assert run(capsys, "merge", str(path))[1] == "0 new measurements, 4 known already\n"
    with Repository.open(path, write=False) as repository:
        assert {*ROWS, make_row("torch.efficient")} == set(repository.rows())


def test_what_cannot_be_used_stops_a_merge_before_anything_is_stored(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = fill(path.with_name("good.db"), *ROWS)
    bad = path.with_name("bad.db")
    bad.write_bytes(good.read_bytes()[:9000])
    code, out, err = run(capsys, "merge", str(good), str(bad))
    assert (code, out) == (1, "")
    assert str(bad) in err
    assert reader.read(path, H200) == []
    assert len(bad.read_bytes()) == 9000


BAD = {
    "import of nothing": (["import", "none.jsonl"], "none.jsonl"),
    "import without a file": (["import"], "FILE"),
    "import of a folder": (["import", "."], "a file that can be read"),
    "import of a database": (["import", "good.db"], "`autofa db merge` takes databases"),
    "merge without a file": (["merge"], "FILE"),
    "merge of nothing": (["merge", "good.db", "none.db"], "none.db"),
    "export over a database": (["export", "good.db"], "a database"),
    "export into a folder": (["export", "."], "a file to write"),
    "export into no folder": (["export", "none/rows.jsonl"], "a file to write"),
    "no database": (["check", "--db", " "], "--db"),
    "a word too many": (["check", "it"], "unexpected"),
    "an unknown command": (["chekc"], "chekc"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_arguments_are_found_before_any_work(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[list[str], str],
) -> None:
    arguments, word = case
    monkeypatch.chdir(path.parent)
    fill(Path("good.db"), *ROWS)
    before = content(path.parent)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert word in err
    assert content(path.parent) == before


EVERY = [["check"], ["export"], ["import", "rows.jsonl"], ["merge", "rows.jsonl"]]


@pytest.mark.parametrize("arguments", EVERY, ids=lambda arguments: arguments[0])
def test_no_password_is_ever_shown(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(path.parent)
    Path("rows.jsonl").write_text(to_json(ROWS[0]))
    for url in ("postgresql://u:secret@127.0.0.1:1/db", "mysql://u:secret@h/db?password=secret"):
        code, out, err = run(capsys, *arguments, "--db", url)
        assert (code, out) == (1, "")
        assert "error: database" in err or "error: driver" in err
        assert "secret" not in err
        code, _, err = run(capsys, "merge", url)
        assert code == 1
        assert "secret" not in err


@pytest.mark.parametrize("arguments", EVERY, ids=lambda arguments: arguments[0])
def test_a_newer_database_is_left_alone(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(path.parent)
    Path("rows.jsonl").write_text(to_json(ROWS[1]))
    fill(path, ROWS[0])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE autofa_alembic_version SET version_num = '9999'")
    before = content(path.parent)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert "schema 9999" in err
    assert content(path.parent) == before


def test_check_of_what_is_sound(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for exists in (False, True):
        if exists:
            path.touch()
        code, out, err = run(capsys, "check")
        assert (code, err) == (0, "")
        assert "no measurements yet" in out
    fill(path, *ROWS)
    assert run(capsys, "check") == (0, f"{path}: 3 sound measurements of 1 devices\n", "")


def test_check_names_damaged_rows_and_keeps_the_file(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(path, *ROWS)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE autofa_measurement SET time_ms = 0.1 WHERE id = 2")
        connection.execute("UPDATE autofa_measurement SET status = 'good' WHERE id = 3")
    code, out, err = run(capsys, "check")
    assert (code, out) == (3, f"{path}: 1 sound measurements of 1 devices\n")
    assert "row 2: the content hash does not match" in err
    assert "row 3: status is 'good', not one of ok" in err
    assert not list(path.parent.glob("*.corrupt-*"))
    code, out, err = run(capsys, "export")
    assert (code, out) == (3, f"{to_json(ROWS[0])}\n")
    assert "2 left out" in err


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:9000])


def noise(path: Path) -> None:
    path.write_bytes(os.urandom(20000))


def an_index(path: Path) -> None:
    """An index that lost an entry: sound page by page, so that only the whole check finds it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        name = "ix_autofa_measurement_device_id_bucket_slug"
        root, sql = connection.execute(
            "SELECT rootpage, sql FROM sqlite_master WHERE name = ?", (name,)
        ).fetchone()
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("DELETE FROM sqlite_master WHERE name = ?", (name,))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM autofa_measurement WHERE id = 3")
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "INSERT INTO sqlite_master VALUES ('index', ?, 'autofa_measurement', ?, ?)",
            (name, root, sql),
        )


@pytest.mark.parametrize("damage", [half, noise, an_index])
def test_check_moves_a_damaged_file_aside_and_never_deletes_it(
    path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    fill(path, *ROWS)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    damage(path)
    before = path.read_bytes()
    code, out, err = run(capsys, "check")
    assert (code, out) == (1, "")
    (aside,) = path.parent.glob("autofa.db.corrupt-2*Z")
    assert f"moved aside: {aside}" in err
    assert aside.read_bytes() == before
    assert not path.exists()
    assert run(capsys, "check")[0] == 0
    assert fill(path, *ROWS).exists()


def test_others_report_a_damaged_file_and_leave_it(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise(path)
    file = path.with_name("rows.jsonl")
    file.write_text(to_json(ROWS[0]))
    before = content(path.parent)
    for arguments in (["export"], ["import", str(file)], ["merge", str(file)]):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (1, "")
        assert "`autofa db check` or the next `autofa tune` moves it aside" in err
    assert _run(["report"]) == 1
    assert content(path.parent) == before


def test_check_leaves_other_programs_files_alone(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
    before = content(path.parent)
    code, out, _ = run(capsys, "check")
    assert (code, "no measurements yet" in out) == (0, True)
    assert content(path.parent) == before


def test_a_lost_view_is_told(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(path, *ROWS)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP VIEW autofa_dispatch")
    code, out, err = run(capsys, "check")
    assert (code, out) == (1, "")
    assert "the next `autofa tune` makes it anew" in err


def test_a_locked_file_is_waited_for_and_then_told(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, ROWS[0])
    file = path.with_name("rows.jsonl")
    file.write_text("".join(f"{to_json(row)}\n" for row in ROWS))
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert run(capsys, "check")[0] == 0
        assert run(capsys, "export")[1] == f"{to_json(ROWS[0])}\n"
        with monkeypatch.context() as patch:
            patch.setattr(Repository, "open", partial(Repository.open, timeout=0.2))
            code, out, err = run(capsys, "import", str(file))
        assert (code, out) == (1, "")
        assert "a lock held by another" in err
        release = threading.Timer(0.3, lambda: other.execute("ROLLBACK"))
        release.start()
        assert run(capsys, "import", str(file))[1] == "2 new measurements, 1 known already\n"
        release.join()


def test_an_export_replaces_a_file_whole_and_writes_into_devices(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(path, *ROWS)
    file, link = path.with_name("rows.jsonl"), path.with_name("link.jsonl")
    file.write_text("older\n" * 1000)
    link.symlink_to(file)
    assert run(capsys, "export", str(link))[0] == 0
    assert link.is_symlink()
    assert len(file.read_text().splitlines()) == 3
    assert run(capsys, "export", os.devnull)[0] == 0
    assert Path(os.devnull).is_char_device()
    assert not list(path.parent.glob("*.partial-*"))


def test_a_reader_that_goes_away_is_no_error(path: Path) -> None:
    fill(path, *(make_row(f"test.kernel-{i}") for i in range(500)))
    command = f"{sys.executable} -m autofa db export | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, "AUTOFA_DB": str(path)},
        check=False,
    )
    assert done.returncode in (0, 141)
    assert (len(done.stdout.splitlines()), done.stderr) == (1, "")
