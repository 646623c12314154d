"""Device keys and limits: exact, and derived without touching a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autofa.device import (
    CUDA_ARCHS,
    CpuInfo,
    DeviceKey,
    cpu_key,
    cpu_limits,
    cuda_build_arch,
    cuda_limits,
    limits_of,
    named_limits,
    parse_cpuinfo,
)
from autofa.errors import UsageError

V4 = "avx2 bmi1 bmi2 f16c fma movbe avx512f avx512bw avx512cd avx512dq avx512vl"


def test_cpu_level_comes_from_flags() -> None:
    assert parse_cpuinfo(f"model name\t: A  B\nflags\t: {V4} amx_bf16\n", "x86_64") == CpuInfo(
        "A B", 4, frozenset({"amx_bf16"})
    )
    assert parse_cpuinfo("flags: avx2 bmi1 bmi2 f16c fma movbe", "x86_64").level == 3
    assert parse_cpuinfo("flags: sse4_2", "x86_64").level == 0
    assert parse_cpuinfo(f"flags: {V4}", "aarch64").level == 0
    assert parse_cpuinfo("", "x86_64").name == "x86_64"


def test_threads_and_isa_are_part_of_the_cpu_key() -> None:
    info = CpuInfo("Chip", 4, frozenset({"amx_bf16"}))
    assert cpu_key(2, info) != cpu_key(64, info)
    assert cpu_key(2, info).arch == "x86-64-v4+amx_bf16"
    limits = limits_of(cpu_key(2, info))
    assert (limits.capability, limits.units, limits.arch) == (4, 2, "x86-64-v4")
    assert "amx_bf16" in limits.features
    assert cpu_limits(3, CpuInfo("Old", 0, frozenset())).arch == "none"


@pytest.mark.parametrize("arch", CUDA_ARCHS)
def test_every_known_gpu_has_limits(arch: str) -> None:
    limits = cuda_limits(arch)
    assert 64 * 1024 <= limits.smem_per_block <= limits.smem_per_sm
    assert cuda_build_arch(limits.capability) == arch


@pytest.mark.parametrize("arch", ["sm_60", "sm_130", "90", "sm90", "", "sm_9x", "x86-64-v4"])
def test_unknown_architectures_name_the_known_ones(arch: str) -> None:
    with pytest.raises(UsageError, match="sm_90a"):
        cuda_limits(arch)


def test_limits_by_name() -> None:
    assert named_limits("NVIDIA H200") == cuda_limits("sm_90a")
    assert named_limits("rtx 4090").smem_per_block == 99 * 1024
    assert named_limits("x86-64-v3").capability == 3
    with pytest.raises(UsageError, match="RTX 3090"):
        named_limits("RTX 9999")


def test_limits_of_a_stored_gpu() -> None:
    key = DeviceKey("cuda", "NVIDIA H200", "sm_90", 132, 140)
    limits = limits_of(key)
    assert (limits.arch, limits.units, limits.smem_per_block) == ("sm_90a", 132, 227 * 1024)
    assert str(key) == "NVIDIA H200 (sm_90, 132 SMs)"


def test_a_gpu_newer_than_all_known_is_taken_for_the_newest_and_gets_ptx() -> None:
    newest = limits_of(DeviceKey("cuda", "GPU", "sm_121", 48, 64))
    future = limits_of(DeviceKey("cuda", "GPU of the future", "sm_140", 48, 64))
    assert newest.arch == "sm_121a"
    assert future == replace(newest, arch="compute_121")
    with pytest.raises(UsageError, match="sm_61"):
        limits_of(DeviceKey("cuda", "Old GPU", "sm_61", 20, 8))
