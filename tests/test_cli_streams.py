"""What the command does when stdout or stderr is full, closed or no longer read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
