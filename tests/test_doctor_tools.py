"""`autofa doctor` of compilers and of the cache; and a whole run of it leaves no trace."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from doctor_samples import (
    CPU,
    H200,
    SHAPE,
    diagnose,
    here,
    missing_winner,
    refuse,
    rows_of_cpu,
    sound_machine,
    told,
)
from store_samples import fill

from autofa import settings
from autofa.compiler import build, toolchain, trial
from autofa.diagnosis import compilers, machine
from autofa.kernels.family import KernelFamily


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sound_machine(monkeypatch, tmp_path)


# ---- compilers ----


@pytest.mark.parametrize("fault", ["none", "false", "hangs", "old", "cannot compile"])
@pytest.mark.parametrize("case", ["untuned", "tuned", "a winner is missing"])
def test_a_compiler_is_a_problem_where_something_is_to_be_compiled(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fault: str,
    case: str,
) -> None:
    if case == "tuned":
        fill(tmp_path / "autofa.db", *rows_of_cpu())
    elif case == "a winner is missing":
        missing_winner(tmp_path / "autofa.db")
    monkeypatch.setattr(compilers, "find", partial(toolchain.find, patience=0.3))
    script = tmp_path / "g++"
    version = "g++ (Fake) 13.2.0" if fault == "cannot compile" else "g++ (Fake) 9.1.0"
    rest = "sleep 60" if fault == "hangs" else f"echo '{version}'"
    script.write_text(f"#!/bin/sh\n[ $1 = --version ] || exit 3\n{rest}\n")
    script.chmod(0o755)
    command = {"none": "no-such-compiler", "false": "/bin/false"}.get(fault, str(script))
    monkeypatch.setenv("CXX", command)
    if fault == "cannot compile":
        monkeypatch.setattr(compilers, "find", toolchain.find)
        monkeypatch.setattr(
            compilers, "trial_problem", lambda *a: f"{script} cannot compile an empty file"
        )
    code, findings = diagnose(capsys)
    level = "info" if case == "tuned" else "problem"
    assert code == (0 if case == "tuned" else 1)
    said = told(findings, "compilers", level)
    assert command in said
    assert ("install g++ 11" in said) or ("mend this compiler" in said)


def test_a_compiler_is_tried_on_an_empty_file(
    fake_cxx: Callable[[str], settings.Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "trial_problem", trial.problem)
    broken = fake_cxx('echo "fatal error: cc1plus not found" >&2; exit 1')
    (found,) = compilers.compiler_findings("cpu", broken, (CPU,), "needed to tune")
    assert found.level == "problem"
    assert "cc1plus not found" in found.found
    sound = fake_cxx('exec $real "$@"')
    (found,) = compilers.compiler_findings("cpu", sound, (CPU,), "needed to tune")
    assert found.level == "ok"


def test_a_gpu_without_nvcc_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = here(cuda_problem=None, cuda="13.0", devices=(CPU, H200), gpus=("NVIDIA H200",))
    monkeypatch.setattr(machine, "look", lambda: gpu)
    monkeypatch.setattr(toolchain, "_pip_nvcc", lambda: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("g++", "c++", "ninja"):
        where = shutil.which(name)
        if where is not None:
            (tools / name).symlink_to(where)
    monkeypatch.setenv("PATH", str(tools))
    code, findings = diagnose(capsys)
    assert code == 1
    said = told(findings, "compilers", "problem")
    assert "pip install autofa[cuda]" in said
    assert "needed to tune NVIDIA H200" in said


# ---- the cache ----


@pytest.fixture
def library(tiny_family: Callable[..., KernelFamily]) -> Path:
    """One sound library in the cache of the environment."""
    variant = tiny_family().variant({"factor": 3}, SHAPE)
    (result,) = build([(variant, "x86-64-v3")], settings.load())
    assert result.library is not None
    return result.library


def test_a_sound_cache(capsys: pytest.CaptureFixture[str], library: Path) -> None:
    code, findings = diagnose(capsys)
    assert code == 0
    assert "1 compiled kernels" in told(findings, "cache", "ok")


def flipped(library: Path) -> None:
    data = bytearray(library.read_bytes())
    data[-1] ^= 255
    library.write_bytes(bytes(data))


def pipe_in_place(library: Path) -> None:
    library.unlink()
    os.mkfifo(library)


CACHES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda library: os.truncate(library, 100), "1 are damaged and not loaded"),
    "changed": (flipped, "its content has changed"),
    "a pipe": (pipe_in_place, "1 are damaged and not loaded"),
    "no record": (lambda library: library.with_suffix(".json").unlink(), "its record"),
    "writable": (lambda library: library.chmod(0o666), "others may write to it"),
    "open folder": (lambda library: library.parent.chmod(0o777), "others may write to it"),
}


@pytest.mark.parametrize("fault", list(CACHES))
def test_damaged_caches(fault: str, capsys: pytest.CaptureFixture[str], library: Path) -> None:
    damage, words = CACHES[fault]
    damage(library)
    code, findings = diagnose(capsys)
    assert code == 1
    assert words in told(findings, "cache", "problem")


def test_a_file_in_place_of_the_cache(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    code, findings = diagnose(capsys)
    assert code == 1
    assert "no folder -> set AUTOFA_CACHE_DIR" in told(findings, "cache", "problem")


@pytest.mark.parametrize("tuned", [False, True])
def test_a_cache_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    library: Path,
    tuned: bool,
) -> None:
    if tuned:
        fill(tmp_path / "autofa.db", *rows_of_cpu())
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: "cache" not in str(path) and real(path, mode)
    )
    code, findings = diagnose(capsys)
    assert code == (0 if tuned else 1)
    assert "cannot be written" in told(findings, "cache", "info" if tuned else "problem")


def test_a_full_disk_and_a_noexec_mount(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, library: Path
) -> None:
    usage = shutil.disk_usage(library)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    monkeypatch.setattr("mmap.mmap", partial(refuse, PermissionError(1, "not permitted")))
    said = told(diagnose(capsys)[1], "cache", "problem")
    assert "1 MiB are free -> free the disk" in said
    assert "1 are damaged and not loaded" in said


def tree(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(root)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in root.rglob("*")
    }


@pytest.mark.parametrize("tuned", [False, True])
def test_a_whole_run_leaves_no_trace(tmp_path: Path, library: Path, tuned: bool) -> None:
    world = tmp_path / "world"
    for name in ("home", "tmp", "work"):
        (world / name).mkdir(parents=True)
    environment = {
        **os.environ,
        "HOME": str(world / "home"),
        "TMPDIR": str(world / "tmp"),
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for name in ("AUTOFA_DB", "AUTOFA_CACHE_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        environment.pop(name, None)
    if tuned:
        environment["AUTOFA_DB"] = str(fill(world / "data" / "autofa.db", *rows_of_cpu()))
        with closing(sqlite3.connect(world / "data" / "autofa.db")) as connection:
            connection.execute("PRAGMA journal_mode=wal")
        shutil.copytree(library.parent.parent.parent, world / "cache")
        environment["AUTOFA_CACHE_DIR"] = str(world / "cache")
    before = tree(world)
    done = subprocess.run(
        [sys.executable, "-m", "autofa", "doctor", "--format", "json"],
        capture_output=True, text=True, timeout=120, check=False, env=environment,
        cwd=world / "work",
    )  # fmt: skip
    assert done.stderr == ""
    problems = json.loads(done.stdout)["problems"]  # of this machine, a GPU without nvcc say
    assert done.returncode == (1 if problems else 0), done.stdout
    # The folders for temporary files were used, and are as empty as before.
    after = {name: stamp for name, stamp in tree(world).items() if name != "tmp"}
    assert after == {name: stamp for name, stamp in before.items() if name != "tmp"}
    findings = json.loads(done.stdout)["findings"]
    assert any("the runtime operator loads" in entry["found"] for entry in findings)
