"""Builds that hang, are killed, are interrupted, and run side by side."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from compiler_helpers import TARGET, calls, processes_naming, requests_of, until

from autofa.compiler import build
from autofa.kernels.family import KernelFamily
from autofa.settings import Settings

MakeFamily = Callable[..., KernelFamily]


def test_a_compiler_that_hangs_is_killed_with_all_it_started(
    tiny_family: MakeFamily, fake_cxx: Callable[[str], Settings], tmp_path: Path
) -> None:
    settings = fake_cxx(
        'case "$*" in *0.cpp*) sleep 4711.25 & sleep 4711.25;; esac; exec $real "$@"'
    )
    hung, good = build(requests_of(tiny_family(), 1, 2), settings, timeout=1.5)
    assert (hung.status, good.status) == ("timeout", "ok")
    assert "stopped after 1.5 s" in hung.message
    assert hung.library is None
    assert until(lambda: not processes_naming("4711.25"))


@pytest.fixture
def script(tmp_path: Path, fake_cxx: Callable[[str], Settings]) -> Callable[..., list[str]]:
    """The command of another process that builds the tiny family of this test."""

    def make(cxx_text: str, factors: tuple[int, ...] = (3,)) -> list[str]:
        settings = fake_cxx(cxx_text)
        text = f"""
            import sys, logging
            from dataclasses import replace
            from pathlib import Path
            from autofa import settings
            from autofa.compiler import build
            from autofa.kernels.family import Domain, KernelFamily, Param
            from autofa.problem import parse_shape
            logging.basicConfig(level="WARNING")
            family = KernelFamily(
                "test.tiny", "tiny", 1, "tiny", "kernel.h",
                Domain("cpu", ("f32",), masks=("none", "causal")),
                (Param("factor", tuple(range(1, 13)), "x{{}}"),),
                lambda p, limits: limits.arch, lambda problem, limits: {{"factor": 1}},
                specialised=("dtype",), root=Path({str(tmp_path / "csrc")!r}),
            )
            problem = parse_shape("1,8,128,64", dtype="f32", device="cpu")
            own = replace(
                settings.load(), cache_dir=Path({str(tmp_path / "cache")!r}),
                cxx=({str(settings.cxx[0]) if settings.cxx else ""!r},), max_jobs=2,
            )
            requests = [(family.variant({{"factor": n}}, problem), {TARGET!r}) for n in {factors}]
            print("started", flush=True)
            for result in build(requests, own):
                print(result.status, "cached" if result.cached else "compiled", flush=True)
        """
        (tmp_path / "builder.py").write_text(textwrap.dedent(text))
        return [sys.executable, str(tmp_path / "builder.py")]

    return make


@pytest.fixture
def start() -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []

    def begin(command: list[str]) -> subprocess.Popen[str]:
        root = str(Path(__file__).parent.parent)
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": root},
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def test_two_processes_compile_the_same_thing_once(
    tiny_family: MakeFamily,
    tmp_path: Path,
    script: Callable[..., list[str]],
    start: Callable[[list[str]], subprocess.Popen[str]],
) -> None:
    tiny_family()
    command = script('sleep 2; exec $real "$@"', (3, 4))
    both = [start(command), start(command)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    outs = sorted(out.split()[1:] for out, _ in said)
    assert outs == [["ok", "cached"] * 2, ["ok", "compiled"] * 2]
    assert calls(tmp_path) == 2
    waited = "".join(err for _, err in said)
    assert re.search(r"waiting for process \d+ \(builder\.py\)", waited)


@pytest.mark.parametrize("factors", [(3,), (3, 4, 5)], ids=["direct", "ninja"])
def test_a_killed_build_leaves_nothing_behind_that_matters(
    tiny_family: MakeFamily,
    here: Settings,
    tmp_path: Path,
    script: Callable[..., list[str]],
    start: Callable[[list[str]], subprocess.Popen[str]],
    factors: tuple[int, ...],
) -> None:
    family = tiny_family()
    command = script("sleep 4712.25", factors)
    process = start(command)
    assert until(lambda: processes_naming("4712.25"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    # Its compilers die with it, its lock is free, and what it had begun is not seen.
    assert until(lambda: not processes_naming("4712.25"))
    assert until(lambda: not processes_naming(f"{tmp_path}/cache"))
    folder = tmp_path / "cache" / "variants" / TARGET
    assert list(folder.glob(".build-*"))
    assert not list(folder.glob("*.so"))
    started = time.monotonic()
    results = build(requests_of(family, *factors), here)
    assert {b.status for b in results} == {"ok"}
    assert time.monotonic() - started < 10
    assert not list(folder.glob(".build-*"))


def test_an_interrupted_build_stops_its_compilers(
    tiny_family: MakeFamily,
    script: Callable[..., list[str]],
    start: Callable[[list[str]], subprocess.Popen[str]],
) -> None:
    tiny_family()
    process = start(script("sleep 4713.25", (3, 4, 5)))
    assert until(lambda: processes_naming("4713.25"))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) != 0
    assert until(lambda: not processes_naming("4713.25"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_hung_question_for_the_version_ends_with_whoever_asked(
    tmp_path: Path, start: Callable[[list[str]], subprocess.Popen[str]], number: signal.Signals
) -> None:
    hung = tmp_path / "hung-g++"
    hung.write_text("#!/bin/sh\nsleep 4711.75 & sleep 4711.75\n")
    hung.chmod(0o755)
    text = f"""
        from autofa.compiler import find
        from autofa.settings import Settings
        from autofa.tuning.control import signals_interrupt
        with signals_interrupt():
            find("cpu", Settings(cxx=({str(hung)!r},), search_path="/usr/bin:/bin"))
    """
    (tmp_path / "asker.py").write_text(textwrap.dedent(text))
    asker = start([sys.executable, str(tmp_path / "asker.py")])
    assert until(lambda: processes_naming("4711.75"))
    asker.send_signal(number)
    asker.wait(5)
    assert until(lambda: not processes_naming("4711.75"))
