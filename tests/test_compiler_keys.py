"""Stubs, fingerprints, job counts and what is read out of compilers' logs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autofa.compiler import Usage, default_jobs, fingerprint, jobs
from autofa.compiler.diagnostics import headline, killed_for_memory, parse_usage, serialized
from autofa.compiler.render import identity, stub
from autofa.errors import UsageError
from autofa.kernels.family import Domain, KernelFamily, Param, Variant
from autofa.problem import parse_shape
from autofa.settings import Settings

MakeFamily = Callable[..., KernelFamily]
PROBLEM = parse_shape("1,8,128,64", dtype="f32", device="cpu")


def variant_of(family: KernelFamily, factor: int = 3) -> Variant:
    return family.variant({"factor": factor}, PROBLEM)


def test_the_stub_names_every_parameter_and_asserts_what_is_declared() -> None:
    family = KernelFamily(
        name="test.named",
        title="named",
        version=1,
        folder="named",
        entry="kernel.cuh",
        domain=Domain("cuda", ("f16", "bf16")),
        params=(Param("block_m", (64, 128)), Param("isa", ("v3", "v4")), Param("sum", ("f32",))),
        target=lambda p, limits: limits.arch,
        default=lambda problem, limits: {"block_m": 64},
        smem_bytes=lambda p, problem: p.block_m * problem.head_dim * 2,
        threads=lambda p, problem: 2 * p.block_m,
    )
    problem = parse_shape("1,8,128,64", dtype="bf16", mask="causal_lower_right")
    text = stub(family.variant({"block_m": 128, "isa": "v4", "sum": "f32"}, problem))
    for line in (
        '#include "kernels/named/kernel.cuh"',
        "static constexpr int dtype = AUTOFA_BF16;",
        "static constexpr int head_dim = 64;",
        "static constexpr int causal = AUTOFA_CAUSAL_LOWER_RIGHT;",
        "static constexpr int mask = AUTOFA_MASK_NONE;",
        "static constexpr int block_m = 128;",
        "static constexpr int isa = AUTOFA_V4;",
        "static constexpr int sum = AUTOFA_F32;",
        "using Variant = autofa::named::Kernel<Params>;",
        "Variant::threads == 256",
        "Variant::smem_bytes == 16384",
    ):
        assert line in text


def test_what_is_not_specialised_is_not_in_the_stub(tiny_family: MakeFamily) -> None:
    text = stub(variant_of(tiny_family()))
    assert "head_dim" not in text
    assert "causal" not in text


def test_identity_survives_quotes() -> None:
    assert '#define AUTOFA_COMPILER "g++ \\"x\\" \\\\"' in identity("s", "f", "t", 'g++ "x" \\')


def test_a_fingerprint_follows_the_code_and_nothing_else(
    tiny_family: MakeFamily, tmp_path: Path
) -> None:
    family = tiny_family()
    variant = variant_of(family)
    before = fingerprint(variant, "x86-64-v3")
    assert fingerprint(variant, "x86-64-v4") != before
    assert fingerprint(variant_of(family, 4), "x86-64-v3") != before

    # Nothing that is not included counts, nor does where the tree lies.
    (tmp_path / "csrc" / "kernels" / "tiny" / "other.h").write_text("int other;")
    assert fingerprint(variant, "x86-64-v3") == before
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "csrc", moved)
    assert fingerprint(variant_of(replace(family, root=moved)), "x86-64-v3") == before

    # A header that is included by what is included.
    (tmp_path / "csrc" / "kernels" / "tiny" / "answer.h").write_text("constexpr int kAnswer = 8;\n")
    assert fingerprint(variant, "x86-64-v3") != before


@pytest.mark.parametrize(
    "line",
    ['#include "extra.h"', '  #  include "extra.h"  // why', "#include <kernels/tiny/extra.h>"],
)
def test_includes_of_every_form_are_followed(
    tiny_family: MakeFamily, tmp_path: Path, line: str
) -> None:
    variant = variant_of(tiny_family())
    folder = tmp_path / "csrc" / "kernels" / "tiny"
    (folder / "answer.h").write_text(f"#if 0\n{line}\n#endif\nconstexpr int kAnswer = 7;\n")
    without = fingerprint(variant, "x86-64-v3")
    extra = folder / "extra.h"
    extra.write_text('#pragma once\n#include "answer.h"\n')  # a circle must end
    answer = folder / "answer.h"
    os.utime(answer, ns=(1, 1))  # the scan is repeated once a file it knows has changed
    with_it = fingerprint(variant, "x86-64-v3")
    assert with_it != without
    extra.write_text('#pragma once\n#include "answer.h"\nint more;\n')
    assert fingerprint(variant, "x86-64-v3") != with_it


def test_keys_and_builds_need_the_standard_library_only() -> None:
    # setup.py builds before anything is installed, and no key may depend on torch or Python.
    root = Path(__file__).resolve().parent.parent
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import autofa.compiler"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_unknown_targets_are_refused(tiny_family: MakeFamily) -> None:
    for target in ("sm_9", "x86-64-v9", "native", "", "sm_90a;rm"):
        with pytest.raises(UsageError, match="build target"):
            fingerprint(variant_of(tiny_family()), target)


GXX = """In file included from 0.cpp:3:
/src/csrc/kernels/tiny/kernel.h: In instantiation of 'struct K<P>':
/src/csrc/kernels/tiny/kernel.h:7:3: error: static assertion failed: threads: no
    7 |   static_assert(false)
compilation terminated.
"""
GXX_GONE = "0.cpp:2:10: fatal error: kernels/tiny/kernel.h: No such file or directory\n"
NVCC = """/src/csrc/kernels/tiny/kernel.h(12): error: identifier "foo" is undefined

1 error detected in the compilation of "0.cu".
"""
NVCC_HOST = """In file included from /cuda/include/cuda_runtime.h:82:
/cuda/include/crt/host_config.h:143:2: error: #error -- unsupported GNU version! gcc 16
  143 | #error -- unsupported GNU version!
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (GXX, "kernels/tiny/kernel.h:7:3: error: static assertion failed: threads: no"),
        (GXX_GONE, "0.cpp:2:10: fatal error: kernels/tiny/kernel.h: No such file or directory"),
        (NVCC, 'kernels/tiny/kernel.h(12): error: identifier "foo" is undefined'),
        (NVCC_HOST, "unsupported GNU version! gcc 16"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_70'\n", "nvcc fatal   : Unsup"),
        ("/usr/bin/ld: cannot find -lcudart\ncollect2: error: ld returned 1\n", "ld returned 1"),
        ("", "said nothing"),
        ("error: " + "x" * 999, "..."),
    ],
)
def test_the_line_that_matters(log: str, expected: str) -> None:
    line = headline(log, ("/src/csrc", "/src/csrc/include"))
    assert expected in line
    assert "\n" not in line
    assert len(line) <= 300


def test_death_by_memory_is_told_from_errors() -> None:
    assert killed_for_memory(-9, "")
    assert killed_for_memory(137, "")
    assert killed_for_memory(1, "g++: fatal error: Killed signal terminated program cc1plus")
    assert killed_for_memory(255, "nvcc error   : 'cicc' died due to signal 9 (Kill signal)")
    assert not killed_for_memory(1, GXX)
    assert not killed_for_memory(0, "warning: Killed")


def test_usage_is_the_worst_kernel_of_a_library() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Function properties for a
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 400 bytes cmem[0]
ptxas info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""
    assert parse_usage(log, 1024) == Usage(168, 1536, 20)
    assert parse_usage("", 1024) is None


def cgroup(root: Path, limit: str, used: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / "memory.max").write_text(limit)
    (root / "memory.current").write_text(used)


def test_memory_is_the_least_of_what_system_and_cgroups_grant(tmp_path: Path) -> None:
    meminfo, membership = tmp_path / "meminfo", tmp_path / "membership"
    meminfo.write_text("MemTotal: 99 kB\nMemAvailable:   16777216 kB\n")
    membership.write_text("0::/outer/inner\n")
    groups = tmp_path / "cgroup"
    assert jobs.available_memory(meminfo, groups, membership) == 16 << 30
    cgroup(groups / "outer", str(8 << 30), str(5 << 30))
    cgroup(groups / "outer" / "inner", "max\n", "1")
    assert jobs.available_memory(meminfo, groups, membership) == 3 << 30
    membership.write_text("4:cpu,memory:/box\n1:name=systemd:/x\n")
    (groups / "memory").mkdir(parents=True)
    (groups / "memory" / "memory.limit_in_bytes").write_text(str(2 << 30))
    (groups / "memory" / "memory.usage_in_bytes").write_text(str(1 << 29))
    assert jobs.available_memory(meminfo, groups, membership) == (2 << 30) - (1 << 29)
    assert jobs.available_memory(tmp_path / "no", groups, membership) is None


def test_jobs_follow_max_jobs_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda pid: set(range(32)))
    monkeypatch.setattr(jobs, "available_memory", lambda: 6 << 30)
    assert default_jobs(Settings()) == 6
    assert default_jobs(Settings(), "cpu") == 12
    assert default_jobs(Settings(max_jobs=40)) == 40
    monkeypatch.setattr(jobs, "available_memory", lambda: 1 << 20)
    assert default_jobs(Settings()) == 1
    monkeypatch.setattr(jobs, "available_memory", lambda: None)
    assert default_jobs(Settings()) == 32


def test_serialized_wgmma_is_found() -> None:
    said = (
        "(C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x"
    )
    assert serialized(f"ptxas info    : {said}\nptxas info    : 0 bytes gmem") == said
    assert (
        serialized("ptxas info    : (C7519) warpgroup.arrive is injected in around line 302")
        is None
    )
    assert serialized("") is None
