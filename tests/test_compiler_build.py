"""Building for real with small families: results, failures, the cache, and builds side by side."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autofa import settings as environment
from autofa.compiler import Build, build, cache, library_of, record_of, toolchain
from autofa.compiler.render import PARAMS_BYTES
from autofa.errors import ToolchainError, UsageError
from autofa.kernels.family import KernelFamily, Variant
from autofa.problem import parse_shape
from autofa.settings import Settings

MakeFamily = Callable[..., KernelFamily]
TARGET = "x86-64-v3"
PROBLEM = parse_shape("1,8,128,64", dtype="f32", device="cpu")
CUDA_PROBLEM = parse_shape("1,8,128,64", dtype="f32")


@pytest.fixture
def here(tmp_path: Path) -> Settings:
    """The environment's compilers, a cache of this test's own."""
    return replace(environment.load(), cache_dir=tmp_path / "cache", max_jobs=2)


def variant_of(family: KernelFamily, factor: int = 3) -> Variant:
    return family.variant({"factor": factor}, PROBLEM)


def requests_of(family: KernelFamily, *factors: int) -> list[tuple[Variant, str]]:
    return [(variant_of(family, factor), TARGET) for factor in factors]


@pytest.fixture
def fake_cxx(tmp_path: Path, here: Settings) -> Callable[[str], Settings]:
    """Settings with a C++ compiler that runs a shell text first. `$real` is the real command;
    every compilation appends a line to `calls`."""

    def make(text: str, version: str = "g++ (Fake) 13.2.0") -> Settings:
        real = shlex.join(toolchain.find("cpu", here).command)
        script = tmp_path / "fake-g++"
        script.write_text(
            f"#!/bin/sh\nif [ \"$1\" = --version ]; then echo '{version}'; exit; fi\n"
            f'real="{real}"\necho "$*" >>{tmp_path / "calls"}\n{text}\n'
        )
        script.chmod(0o755)
        return replace(here, cxx=(str(script),))

    return make


def calls(tmp_path: Path) -> int:
    log = tmp_path / "calls"
    return len(log.read_text().splitlines()) if log.exists() else 0


class Metadata(ctypes.Structure):
    _fields_ = (
        ("abi_version", ctypes.c_uint32),
        ("params_bytes", ctypes.c_uint32),
        ("slug", ctypes.c_char_p),
        ("fingerprint", ctypes.c_char_p),
        ("target", ctypes.c_char_p),
        ("compiler", ctypes.c_char_p),
    )


def described(library: Path) -> Metadata:
    describe = ctypes.CDLL(str(library)).autofa_describe
    describe.restype = ctypes.POINTER(Metadata)
    found: Metadata = describe().contents
    return found


def test_a_library_says_what_it_is(tiny_family: MakeFamily, here: Settings) -> None:
    (variant, target), *_ = requests = requests_of(tiny_family(), 3)
    [result] = build(requests, here)
    assert (result.status, result.cached) == ("ok", False)
    assert result.library == library_of(variant, target, here)
    found = described(result.library)
    compiler = toolchain.find("cpu", here).version
    assert found.slug.decode() == variant.slug
    assert found.target.decode() == target
    assert found.compiler.decode() == result.compiler == compiler
    assert found.params_bytes == PARAMS_BYTES
    assert found.fingerprint.decode().startswith(result.library.stem.rpartition("-")[2])
    record = record_of(result.library)
    assert record is not None
    assert record.compiler == compiler
    assert record.cpu_seconds > 0


def test_a_second_build_looks_for_no_compiler(tiny_family: MakeFamily, here: Settings) -> None:
    requests = requests_of(tiny_family(), 3, 4)
    first = build(requests, here)
    seen: list[Build] = []
    nothing = replace(here, search_path="", cxx=("no-such-compiler",))
    again = build(requests, nothing, on_done=seen.append)
    assert [b.library for b in again] == [b.library for b in first]
    assert all(b.cached and b.seconds == 0 for b in again)
    assert seen == again
    assert all(b.compiler == first[0].compiler for b in again)


def test_requests_may_repeat_and_keep_their_order(tiny_family: MakeFamily, here: Settings) -> None:
    family = tiny_family()
    requests = requests_of(family, 5, 3, 5)
    seen: list[Build] = []
    results = build(requests, here, on_done=seen.append)
    assert [b.variant.values for b in results] == [(5,), (3,), (5,)]
    assert len(seen) == 2
    assert build([], here) == []


def test_one_that_does_not_compile_spoils_no_other(
    tiny_family: MakeFamily, here: Settings, tmp_path: Path
) -> None:
    requests = requests_of(tiny_family(), 1, 2, 3)
    kernel = tmp_path / "csrc" / "kernels" / "tiny" / "kernel.h"
    kernel.write_text(
        kernel.read_text().replace(
            "  static int64_t", '  static_assert(Params::factor != 2, "two");\n  static int64_t'
        )
    )
    good, bad, other = build(requests, here)
    assert (good.status, other.status) == ("ok", "ok")
    assert bad.status == "compile_error"
    assert bad.library is None
    line, _, log = bad.message.partition(" [")
    assert re.fullmatch(r"kernels/tiny/kernel\.h:\d+:\d+: error: static assertion .*two", line)
    assert "static assertion failed" in Path(log.rstrip("]")).read_text()
    assert library_of(*requests[1], here) is None


@pytest.mark.parametrize(("field", "line"), [("threads", "threads"), ("smem_bytes", "shared mem")])
def test_a_kernel_that_drifts_from_its_declaration_does_not_compile(
    tiny_family: MakeFamily, here: Settings, field: str, line: str
) -> None:
    family = tiny_family(**{field: lambda params, problem: 64})
    [result] = build(requests_of(family, 3), here)
    assert result.status == "compile_error"
    assert f"{line}" in result.message
    assert "not what the declaration says" in result.message


def test_results_arrive_while_others_still_compile(
    tiny_family: MakeFamily, fake_cxx: Callable[[str], Settings]
) -> None:
    settings = fake_cxx('case "$*" in *0.cpp*) sleep 2;; esac; exec $real "$@"')
    arrived: dict[int, float] = {}
    started = time.monotonic()
    build(
        requests_of(tiny_family(), 1, 2),
        settings,
        on_done=lambda b: arrived.setdefault(int(b.variant.values[0]), time.monotonic() - started),
    )
    assert arrived[2] < 2 <= arrived[1]


def processes_naming(text: str) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in place.read_text(errors="replace"):
                found.append(int(place.parent.name))
        except OSError:
            continue
    return found


def until(condition: Callable[[], object], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


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


def test_a_compiler_killed_for_memory_is_tried_once_more_by_itself(
    tiny_family: MakeFamily, fake_cxx: Callable[[str], Settings], tmp_path: Path
) -> None:
    once = tmp_path / "killed"
    settings = fake_cxx(f'[ -e {once} ] || {{ touch {once}; kill -9 $$; }}; exec $real "$@"')
    [result] = build(requests_of(tiny_family(), 1), settings)
    assert (result.status, calls(tmp_path)) == ("ok", 2)


def test_a_compiler_killed_twice_is_out_of_memory(
    tiny_family: MakeFamily, fake_cxx: Callable[[str], Settings], tmp_path: Path
) -> None:
    settings = fake_cxx('case "$*" in *0.cpp*) exit 137;; esac; exec $real "$@"')
    starved, good = build(requests_of(tiny_family(), 1, 2), settings)
    assert (starved.status, good.status) == ("out_of_memory", "ok")
    assert "for want of memory, twice" in starved.message
    assert calls(tmp_path) == 3


def test_a_broken_compiler_is_reported_once(
    tiny_family: MakeFamily, fake_cxx: Callable[[str], Settings], tmp_path: Path
) -> None:
    settings = fake_cxx('echo "x.h:1: fatal error: cc1plus not found" >&2; sleep 0.2; exit 1')
    seen: list[Build] = []
    with pytest.raises(ToolchainError, match="cannot compile an empty file") as caught:
        build(requests_of(tiny_family(), *range(1, 13)), settings, on_done=seen.append)
    assert "cc1plus not found" in str(caught.value)
    assert seen == []
    assert calls(tmp_path) <= 6  # and not 12: what was running, what came next, the empty file


def test_nothing_is_started_without_a_compiler(
    tiny_family: MakeFamily, here: Settings, tmp_path: Path
) -> None:
    with pytest.raises(ToolchainError, match="no such command"):
        build(requests_of(tiny_family(), 1), replace(here, cxx=("no-such-compiler",)))
    with pytest.raises(UsageError, match="build target"):
        build([(variant_of(tiny_family()), "sm_9")], here)
    assert not (tmp_path / "cache").exists()


def test_one_at_a_time_needs_no_ninja(
    tiny_family: MakeFamily, here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(settings: Settings) -> str:
        raise ToolchainError("ninja: missing")

    for module in ("autofa.compiler.build", "autofa.compiler.execute"):
        monkeypatch.setattr(sys.modules[module], "find_ninja", none)
    requests = requests_of(tiny_family(), 1, 2)
    with pytest.raises(ToolchainError, match="ninja: missing"):
        build(requests, here, jobs=2)
    assert [b.status for b in build(requests, here, jobs=1)] == ["ok", "ok"]


def test_an_edited_header_makes_a_new_library(
    tiny_family: MakeFamily, here: Settings, tmp_path: Path
) -> None:
    requests = requests_of(tiny_family(), 3)
    [old] = build(requests, here)
    answer = tmp_path / "csrc" / "kernels" / "tiny" / "answer.h"
    answer.write_text("#pragma once\nconstexpr int kAnswer = 9;\n")
    assert library_of(*requests[0], here) is None
    [new] = build(requests, here)
    assert not new.cached
    assert new.library != old.library
    answer.write_text("#pragma once\nconstexpr int kAnswer = 7;\n")
    [back] = build(requests, here)
    assert (back.cached, back.library) == (True, old.library)


def test_sources_edited_during_the_compilation_are_compiled_again(
    tiny_family: MakeFamily, fake_cxx: Callable[[str], Settings], tmp_path: Path
) -> None:
    answer = tmp_path / "csrc" / "kernels" / "tiny" / "answer.h"
    settings = fake_cxx(
        f'grep -q 77 {answer} || echo "constexpr int kAnswer = 77;" >{answer}; exec $real "$@"'
    )
    requests = requests_of(tiny_family(), 3)
    [result] = build(requests, settings)
    assert (result.status, calls(tmp_path)) == ("ok", 2)
    assert result.library == library_of(*requests[0], settings)


def test_another_compiler_makes_libraries_anew_once_it_has_work(
    tiny_family: MakeFamily, fake_cxx: Callable[..., Settings], tmp_path: Path
) -> None:
    family = tiny_family()
    build(requests_of(family, 1), fake_cxx('exec $real "$@"'))
    newer = fake_cxx('exec $real "$@"', "g++ (Fake) 14.1.0")
    toolchain._find.cache_clear()
    assert build(requests_of(family, 1), newer)[0].cached
    both = build(requests_of(family, 1, 2), newer)
    assert [b.cached for b in both] == [False, False]
    assert {b.compiler for b in both} == {"g++ (Fake) 14.1.0"}


def test_caches_are_private_and_suspect_libraries_are_not_loaded(
    tiny_family: MakeFamily, here: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    requests = requests_of(tiny_family(), 3)
    [result] = build(requests, here)
    library = result.library
    assert library is not None
    for folder in (library.parent, library.parent.parent, library.parent.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    library.chmod(0o666)
    assert library_of(*requests[0], here) is None
    assert "others may write to it" in caplog.text
    library.chmod(0o644)
    library.parent.chmod(0o770)
    assert library_of(*requests[0], here) is None
    library.parent.chmod(0o700)
    assert library_of(*requests[0], here) == library


def test_a_library_of_another_user_is_not_loaded(
    tiny_family: MakeFamily, here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(tiny_family(), 3)
    [result] = build(requests, here)
    assert result.library is not None
    if os.geteuid() == 0:
        os.chown(result.library, 12345, 12345)
    else:
        monkeypatch.setattr(cache.os, "geteuid", lambda: 12345)
    assert library_of(*requests[0], here) is None


def test_a_cache_may_be_carried_to_another_place(
    tiny_family: MakeFamily, here: Settings, tmp_path: Path
) -> None:
    requests = requests_of(tiny_family(), 3)
    build(requests, here)
    (tmp_path / "cache").rename(tmp_path / "carried")
    carried = replace(here, cache_dir=tmp_path / "carried", search_path="")
    [result] = build(requests, carried)
    assert result.cached


def test_prebuilt_libraries_serve_where_the_cache_has_none(
    tiny_family: MakeFamily, here: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(tiny_family(), 3)
    build(requests, here)
    (tmp_path / "cache").rename(tmp_path / "native")
    monkeypatch.setattr(cache, "native_dir", lambda: tmp_path / "native")
    found = library_of(*requests[0], here)
    assert found is not None
    assert found.is_relative_to(tmp_path / "native")
    [result] = build(requests, replace(here, search_path=""))
    assert (result.cached, result.library) == (True, found)


def test_a_cache_that_cannot_be_written(
    tiny_family: MakeFamily, here: Settings, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(ToolchainError, match="set AUTOFA_CACHE_DIR"):
        build(requests_of(tiny_family(), 3), replace(here, cache_dir=blocked))


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    for text in ("", "{bad", "[]", "{}", '{"usage": null, "surprise": 1}'):
        (tmp_path / "x.json").write_text(text)
        assert record_of(tmp_path / "x.so") is None


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


@pytest.mark.nvcc
def test_cuda_libraries_without_a_gpu(tiny_family: MakeFamily, here: Settings) -> None:
    family = tiny_family("cuda")
    variant = family.variant({"factor": 2}, CUDA_PROBLEM)
    targets = ("sm_80", "sm_90a", "sm_70", "sm_120a", "sm_130")
    results = dict(zip(targets, build([(variant, t) for t in targets], here), strict=True))
    for target in ("sm_80", "sm_90a", "sm_120a"):
        result = results[target]
        assert result.status == "ok", result.message
        assert result.usage is not None
        assert result.usage.smem_bytes == 1024 + 2048
        assert 0 < result.usage.registers <= 255
        assert result.cpu_seconds <= 3
    assert "supported: sm_" in results["sm_70"].message
    assert "a newer CUDA" in results["sm_130"].message
    cached = build([(variant, "sm_80")], replace(here, search_path=""))[0]
    assert (cached.cached, cached.usage) == (True, results["sm_80"].usage)


@pytest.mark.nvcc
def test_nvcc_errors_are_one_line(tiny_family: MakeFamily, here: Settings, tmp_path: Path) -> None:
    family = tiny_family("cuda", smem_bytes=lambda p, problem: 1)
    [result] = build([(family.variant({"factor": 2}, CUDA_PROBLEM), "sm_80")], here)
    assert result.status == "compile_error"
    assert "shared memory: not what the declaration says" in result.message
