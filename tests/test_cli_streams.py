"""What the command does when stdout or stderr is full, closed or no longer read."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from autofa.cli import _run
from autofa.cli.streams import go_to_one_place
from autofa.device import cpu_key
from autofa.problem import parse_shape
from autofa.tuning.events import BucketDone, BucketResult, OnEvent, Summary
from autofa.tuning.request import TuneRequest

tune = import_module("autofa.cli.tune")

COMMANDS = {
    "a help text": "--help",
    "one line": "db path",
    "a report": "report",
    "tables": "kernels --limits x86-64-v4",
    "a document": "explain --shape 1,1,16,16 --device cpu",
    "a head-to-head": "bench --H 1 --N 16 --D 16 --device cpu --iters 3 --kernels torch.flash",
    "a build": "build --families cpu.flash --arch x86-64-v3 --select *f32 --limit 1",
}


def shell(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail -f; {text}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "AUTOFA": f"{sys.executable} -m autofa"},
    )


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk_is_one_line_and_1(arguments: str) -> None:
    done = shell(f"$AUTOFA {arguments} >/dev/full")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "compiled" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("error: stdout: got 'No space left on device'")


@pytest.mark.parametrize("arguments", ["--help", "db path", "nonsense", "db path --db ''"])
@pytest.mark.parametrize("gone", ["2>&-", "2>/dev/full"])
def test_without_stderr_the_result_and_the_code_are_the_same(arguments: str, gone: str) -> None:
    usual = shell(f"$AUTOFA {arguments}")
    done = shell(f"$AUTOFA {arguments} {gone}")
    assert (done.returncode, done.stdout, done.stderr) == (usual.returncode, usual.stdout, "")


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", ">&- 2>&-"])
def test_a_closed_stdout_is_an_error_of_what_prints(closed: str) -> None:
    done = shell(f"$AUTOFA db path {closed}")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == ("2>" not in closed)
    assert shell(f"$AUTOFA report --output /dev/null {closed}").returncode == 0


def test_nobody_reads() -> None:
    done = shell("$AUTOFA --help | head -0; echo ${PIPESTATUS[0]}")
    assert done.stdout.strip() in ("0", "141")
    assert done.stderr == ""


def test_a_file_is_never_opened_in_place_of_a_closed_stream() -> None:
    code = "from autofa.cli.streams import Output; Output(); print(open('/dev/zero').fileno() > 2)"
    found = shell(f'{sys.executable} -c "{code}; import sys; sys.stdout.flush()" 2>&-')
    assert found.stdout == "True\n"


@pytest.mark.parametrize("one_place", [True, False])
def test_tune_says_each_result_once_per_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, one_place: bool
) -> None:
    problems = [parse_shape(f"1,1,{n},64", dtype="f32", device="cpu") for n in (16, 32, 64)]
    fresh, known, cut = (
        BucketResult(problem, "torch.sdpa", 1.0, 3, 0, 0, 1.0, complete)
        for problem, complete in zip(problems, (True, True, False), strict=True)
    )

    def run(request: TuneRequest, on_event: OnEvent) -> Summary:
        for result in (fresh, cut):
            on_event(BucketDone(result))
        return Summary(cpu_key(2), "db", (fresh, known, cut), 3, 6, 3, 0, (), 2.0)

    monkeypatch.setattr("autofa.tuning.session.tune", run)
    monkeypatch.setattr(tune, "go_to_one_place", lambda out, err: one_place)
    assert _run(["tune", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "2 of 3 buckets tuned and 1 in part" in out
    assert [shape in err for shape in ("1,1,16", "1,1,32", "1,1,64")] == [True, False, True]
    assert [shape in out for shape in ("1,1,16", "1,1,32", "1,1,64")] == [
        not one_place,
        True,
        not one_place,
    ]
    assert err.count("in part") == 1


def test_one_place_is_one_file(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as a, (tmp_path / "a").open("a") as b:
        assert go_to_one_place(a, b)
        assert not go_to_one_place(a, io.StringIO())
