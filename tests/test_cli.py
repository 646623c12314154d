"""The command line: exit codes, messages, machine formats, and what reaches which stream."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dispatch_world import problem, store, tuned
from store_samples import failed, make_row

import autofa
from autofa.cli import COMMANDS, _run
from autofa.tuning.contest import Result

SMALL = ["tune", "--shape", "1,2,64,16", "--device", "cpu", "--trials", "1"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = _run(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autofa", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", ["", *COMMANDS, "db path"])
def test_help_of_every_command(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, err = run(capsys, *name.split(), "--help")
    assert (code, err) == (0, "")
    assert "Usage: autofa" in out


BAD = {
    "an unknown command": (["repotr"], "did you mean `report`"),
    "an unknown option": (["report", "--tpo", "3"], "--top"),
    "a shape with three fields": (["tune", "--shape", "1,2,3"], "B,H,N,D"),
    "no rows": (["tune", "--shape", "1,8,0,64"], "seqlen_q"),
    "a negative head dim": (["tune", "--shape", "1,8,16,-1"], "B,H,N,D"),
    "heads that do not divide": (["tune", "--shape", "1,8/3,16,64"], "heads"),
    "an unknown dtype": (["tune", "--dtype", "f8"], "bf16"),
    "an unknown profile": (["tune", "--gpu-profile", "quikc"], "did you mean quick"),
    "a profile without a name": (["tune", "--gpu-profile", ""], "quick, default, full, FILE.toml"),
    "a missing profile file": (["tune", "--gpu-profile", "none.toml"], "readable file"),
    "no trials": (["tune", "--trials", "0"], "x>=1"),
    "a budget of nothing": (["tune", "--budget", "0s"], "90s"),
    "an unknown family": (["tune", "--families", "cpu.flush"], "cpu.flash"),
    "a device that is none": (["tune", "--device", "tpu"], "cuda"),
    "an unknown format": (["report", "--format", "xml"], "json"),
    "an unknown card": (["kernels", "--limits", "RTX 9999"], "RTX 3090"),
    "an architecture that is none": (["build", "--arch", "sm_9x"], "sm_120"),
    "an architecture without variants": (["build", "--arch", "sm_75"], "architecture 80"),
    "a glob that selects nothing": (["build", "--select", "x*"], "autofa kernels"),
    "a head dim that is no number": (["build", "--head-dim", "big"], "64,128"),
    "a kernel glob that selects nothing": (
        ["bench", "--N", "16", "--device", "cpu", "--kernels", "x*"],
        "torch.sdpa",
    ),
    "explain without a shape": (["explain"], "--shape"),
    "no path": (["db", "path", "--db", " "], "URL"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_arguments_exit_2_and_say_what_is_right(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, case: tuple[list[str], str]
) -> None:
    arguments, word = case
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert word in err
    assert "Traceback" not in err
    assert not (tmp_path / "autofa.db").exists()


def test_cuda_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    code, out, err = run(capsys, "tune", "--device", "cuda", "--shape", "1,8,64,64")
    assert (code, out) == (2, "")
    assert "cuda" in err


def test_a_database_that_cannot_be_written_is_found_before_any_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, *SMALL, "--db", str(tmp_path))
    assert (code, out) == (1, "")
    assert "directory" in err
    assert "--db" in err


@pytest.mark.parametrize(
    ("name", "value"), [("MAX_JOBS", "0"), ("MAX_JOBS", "abc"), ("AUTOFA_PRECISION", "f64")]
)
def test_bad_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    code, _, err = run(capsys, *SMALL)
    assert code == 2
    assert name in err
    assert value in err


def test_report_of_a_shape_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    store(tuned(problem("1,2,33,16")))
    code, out, _ = run(capsys, "report", "--shape", "9,9,9,9")
    assert (code, "tune --shape 9,9,9,9" in out) == (0, True)


def test_report_of_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "report")
    assert code == 0
    assert "autofa tune --gpu-profile" in out
    assert json.loads(run(capsys, "report", "--format", "json")[1]) == []
    header, *rest = list(csv.reader(io.StringIO(run(capsys, "report", "--format", "csv")[1])))
    assert "kernel" in header
    assert rest == []
    assert not (tmp_path / "autofa.db").exists(), "report makes no file"


def test_kernels_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "kernels", "--format", "json")
    assert (code, err) == (0, "")
    families = {family["name"]: family for family in json.loads(out)}
    assert families["cpu.flash"]["runs_here"] is True
    assert families["mma.split_q"]["counts"]["sm_90a"]["legal"] > 0
    for family in families.values():
        assert {"name", "params", "constraints", "counts", "runs_here"} <= set(family)


def test_kernels_of_a_card_that_is_too_old_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "kernels", "--limits", "T4")
    assert code == 0
    assert "needs architecture 80 or newer" in out


def test_tune_report_explain_and_tune_again(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *SMALL)
    assert code == 0, err
    assert "1 of 1 buckets tuned" in out
    entries = json.loads(run(capsys, "report", "--format", "json")[1])
    ranks = [entry["rank"] for entry in entries]
    assert ranks == list(range(1, len(entries) + 1))
    kernels = {entry["kernel"] for entry in entries}
    assert {"torch.sdpa", "torch.flash", "torch.unfused"} < kernels
    assert any(kernel.startswith("cpu.flash-") for kernel in kernels)
    for entry in entries:
        assert entry["status"] == "ok"
        assert entry["time_ms"] > 0
        assert entry["bucket"]["head_dim"] == 16
    autofa.reload()  # earlier tests in this process have read other databases
    explained = json.loads(run(capsys, "explain", "--shape", "1,2,64,16", "--device", "cpu")[1])
    assert explained["kernel"] == entries[0]["kernel"]
    assert explained["rung"] == "measured"
    again = run(capsys, *SMALL)
    assert again[0] == 0
    assert "0 candidates measured" in again[1]


def test_bench_prints_values_times_and_gains(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--H", "2", "--N", "64", "--D", "16", "--device", "cpu", "--iters", "3"]
    code, out, err = run(
        capsys, *arguments, "--sdpa", "--torch", "--show-all", "--kernels", "torch.*"
    )
    assert code == 0, err
    assert out.count("TFLOPS") == 3
    assert "%" in out
    assert "--show-all" not in out
    found = json.loads(run(capsys, *arguments, "--kernels", "torch.flash", "--format", "json")[1])
    assert [entry["kernel"] for entry in found] == ["torch.flash"]


def test_bench_says_how_many_kernels_it_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [make_row(f"torch.{name}", ms) for name, ms in (("sdpa", 1.0), ("flash", 2.0))]
    results = [Result(row, (0.5,)) for row in [*rows, failed("torch.cudnn")]]
    module = importlib.import_module("autofa.cli.bench")
    module._print(results, "eager", "simple", show_all=False, device="here")
    assert capsys.readouterr().out.splitlines()[2:] == [
        "2 more did not beat the best before them, or failed: --show-all"
    ]
    module._print(results, "eager", "simple", show_all=True, device="here")
    assert "--show-all" not in capsys.readouterr().out


def test_build_of_what_is_there_compiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["build", "--families", "cpu.flash", "--select", "*f32", "--limit", "1"]
    assert run(capsys, *arguments)[0] == 0
    code, out, err = run(capsys, *arguments)
    assert code == 0
    assert "cached" in out
    assert "0 compiled, 1 already there" in err


def test_explain_of_a_forced_kernel() -> None:
    arguments = ("explain", "--shape", "1,1,16,16", "--device", "cpu")
    found = json.loads(command(*arguments, AUTOFA_FORCE_KERNEL="torch.flash").stdout)
    assert (found["kernel"], found["rung"]) == ("torch.flash", "forced")
    for slug, code, word in (("cpu.flsh", 2, "such as cpu.flash-"), ("torch.cudnn", 1, "cuda")):
        done = command(*arguments, AUTOFA_FORCE_KERNEL=slug)
        assert (done.returncode, done.stdout) == (code, "")
        assert word in done.stderr


def test_no_compiler_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    code, out, err = run(capsys, "build", "--families", "cpu.flash", "--select", "*k9*")
    assert (code, out) == (1, "")
    assert err.count("/nonexistent/g++") == 1


def test_db_path(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "db", "path") == (0, f"{tmp_path / 'autofa.db'}\n", "")
    url = "postgresql://u:secret@host/db"
    assert run(capsys, "db", "path", "--db", url)[1] == "postgresql://u:***@host/db\n"


def test_version_and_module_are_the_command() -> None:
    from autofa import __version__

    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"autofa, version {__version__}\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    shell = f"set -o pipefail; {sys.executable} -m autofa kernels | head -n 1"
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in (0, 141)
    assert done.stderr == ""


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_streams_that_are_not_utf8(encoding: str) -> None:
    done = command("kernels", "--help", PYTHONIOENCODING=encoding, PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(number: signal.Signals, code: int, tmp_path: Path) -> None:
    shapes = [part for n in (64, 128, 256, 512) for part in ("--shape", f"1,2,{n},16")]
    child = subprocess.Popen(
        [sys.executable, "-m", "autofa", "tune", "--device", "cpu", *shapes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 90
    database = tmp_path / "autofa.db"
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if database.exists():
            with sqlite3.connect(database) as connection:
                tables = connection.execute("SELECT name FROM sqlite_master").fetchall()
                if ("autofa_measurement",) in tables and connection.execute(
                    "SELECT count(*) FROM autofa_measurement"
                ).fetchone() != (0,):
                    break
    child.send_signal(number)
    out, err = child.communicate(timeout=30)
    assert child.returncode == code, err
    assert "interrupted; run the same command again" in out
    assert "Traceback" not in err
