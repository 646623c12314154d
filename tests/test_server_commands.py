"""The commands with a server's URL: what they say of its rows, and of a server that is away."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from dispatch_world import built, flash, problem, tuned
from runtime_variants import require_runtime
from store_places import stored

from autofa.cli import _run
from autofa.dispatch import state
from autofa.store.repository import Repository

SHAPE = problem("1,2,33,16")
EXPLAIN = ["explain", "--shape", "1,2,33,16", "--device", "cpu"]
DEAD = "postgresql+psycopg://u:secret@127.0.0.1:1/db"


@pytest.fixture
def served(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A server in use, with a tune of `SHAPE`."""
    require_runtime()
    built(flash())
    with Repository.open(postgres_url, write=True) as repository:
        repository.add(tuned(SHAPE))
    monkeypatch.setenv("AUTOFA_DB", postgres_url)
    state.reload()
    return postgres_url


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = _run(list(arguments))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    for secret in ("secret", "wo/rd", "wo%2Frd"):
        assert secret not in out + err
    return code, out, err


@pytest.mark.postgres
def test_every_command_reads_the_server(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--db", served]):
        code, out, _ = run(capsys, "report", "--format", "json", *options)
        assert code == 0
        assert [entry["kernel"] for entry in json.loads(out)] == [flash().slug, "torch.sdpa"]
    code, out, _ = run(capsys, *EXPLAIN)
    assert (code, json.loads(out)["rung"]) == (0, "measured")
    code, out, _ = run(capsys, "doctor")
    assert "a server, 2 measurements, 2 of the devices here" in " ".join(out.split())
    assert run(capsys, "db", "check")[1].endswith("2 sound measurements of 1 devices\n")
    assert run(capsys, "db", "path")[1].count("***") == 1


@pytest.mark.postgres
def test_a_machine_that_serves_takes_the_winners_along(
    served: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    export, local = str(tmp_path / "rows.jsonl"), str(tmp_path / "serving.db")
    assert run(capsys, "db", "export", export)[0] == 0
    monkeypatch.setenv("AUTOFA_DB", local)
    assert run(capsys, "db", "import", export)[1] == "2 new measurements, 0 known already\n"
    assert set(stored(local)) == set(stored(served))
    state.reload()
    explained = json.loads(run(capsys, *EXPLAIN)[1])
    assert (explained["kernel"], explained["rung"]) == (flash().slug, "measured")


@pytest.mark.parametrize(
    "command",
    [["report"], ["db", "check"], ["db", "export"], ["db", "import", "rows.jsonl"],
     ["db", "merge", "rows.jsonl"], ["doctor"], ["tune", "--shape", "1,1,8,8", "--device", "cpu"]],
    ids=" ".join,
)  # fmt: skip
def test_without_an_answer_the_command_says_so_at_once(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    monkeypatch.setenv("AUTOFA_DB", DEAD)
    started = time.monotonic()
    code, out, err = run(capsys, *command)
    assert time.monotonic() - started < 15
    assert code == 1
    assert "127.0.0.1:1" in out + err
    assert "check that the server runs and lets this user in" in " ".join((out + err).split())


def test_explain_answers_without_the_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_runtime()
    monkeypatch.setenv("AUTOFA_DB", DEAD)
    state.reload()
    code, out, err = run(capsys, *EXPLAIN)
    assert code == 0
    assert "check that the server runs" in json.loads(out)["reason"]
    assert err.count("stored measurements are not used") <= 1
