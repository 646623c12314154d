"""Building for real with small families: results, and failures as data."""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from compiler_helpers import calls, requests_of, variant_of

from autofa.compiler import Build, build, library_of, record_of, toolchain
from autofa.compiler.render import PARAMS_BYTES
from autofa.errors import ToolchainError, UsageError
from autofa.kernels.family import KernelFamily
from autofa.problem import parse_shape
from autofa.settings import Settings

MakeFamily = Callable[..., KernelFamily]
CUDA_PROBLEM = parse_shape("1,8,128,64", dtype="f32")


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
    toolchain._found.clear()
    assert build(requests_of(family, 1), newer)[0].cached
    both = build(requests_of(family, 1, 2), newer)
    assert [b.cached for b in both] == [False, False]
    assert {b.compiler for b in both} == {"g++ (Fake) 14.1.0"}


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
def test_ptx_for_architectures_that_are_to_come(tiny_family: MakeFamily, here: Settings) -> None:
    family = tiny_family("cuda")
    variant = family.variant({"factor": 3}, CUDA_PROBLEM)
    ptx, code = build([(variant, "compute_90"), (variant, "sm_90")], here)
    assert (ptx.status, code.status) == ("ok", "ok")
    assert ptx.library is not None
    assert code.library is not None
    assert ptx.library.parent.name == "compute_90"
    # A fat binary holds PTX compressed, and machine code as ELFs of its own.
    assert ptx.library.read_bytes().count(b"\x7fELF") == 1
    assert code.library.read_bytes().count(b"\x7fELF") > 1


@pytest.mark.nvcc
def test_nvcc_errors_are_one_line(tiny_family: MakeFamily, here: Settings, tmp_path: Path) -> None:
    family = tiny_family("cuda", smem_bytes=lambda p, problem: 1)
    [result] = build([(family.variant({"factor": 2}, CUDA_PROBLEM), "sm_80")], here)
    assert result.status == "compile_error"
    assert "shared memory: not what the declaration says" in result.message
