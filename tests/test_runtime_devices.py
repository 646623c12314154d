"""Devices of torch as keys and limits. GPUs are stood in for by their properties."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autofa import resources
from autofa.device import DeviceKey
from autofa.errors import DeviceError, LaunchError
from autofa.runtime import devices, extension

GIB = 1 << 30
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=143771 << 20
)
SLICE = SimpleNamespace(
    name="NVIDIA H200 MIG 1g.18gb",
    major=9,
    minor=0,
    multi_processor_count=16,
    total_memory=16 * GIB,
)
OLD = SimpleNamespace(
    name="GeForce GTX 1080", major=6, minor=1, multi_processor_count=20, total_memory=8 * GIB
)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with three GPUs, of which the second is current."""
    present = (H200, SLICE, OLD)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(present))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: present[i])
    devices._cuda_key.cache_clear()
    yield
    devices._cuda_key.cache_clear()


def test_a_gpu_is_its_name_and_size_never_its_ordinal(gpus: None) -> None:
    assert devices.device_key("cuda:0") == DeviceKey("cuda", "NVIDIA H200", "sm_90", 132, 140)
    assert devices.device_key("cuda:1") == DeviceKey(
        "cuda", "NVIDIA H200 MIG 1g.18gb", "sm_90", 16, 16
    )
    assert devices.device_key("cuda") == devices.device_key("cuda:1")
    limits = devices.limits(torch.device("cuda", 0))
    assert (limits.arch, limits.capability, limits.units) == ("sm_90a", 90, 132)


def test_a_gpu_older_than_ours_has_nothing_to_give(gpus: None) -> None:
    limits = devices.limits("cuda:2")
    assert (limits.arch, limits.capability, limits.smem_per_block) == ("sm_61", 61, 0)


def test_names_of_devices(gpus: None) -> None:
    assert devices.find_device(None) == torch.device("cuda", 0)
    assert devices.find_device(" CUDA ") == torch.device("cuda", 1)
    assert devices.find_device("cuda:2") == torch.device("cuda", 2)
    assert devices.find_device("cpu:0") == torch.device("cpu")
    for text in ("cuda:3", "mps", "gpu", ""):
        with pytest.raises(DeviceError, match="choose one of these"):
            devices.find_device(text)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices.find_device(None) == torch.device("cpu")
    for cuda, text in ((None, "built without CUDA"), ("13.0", "no NVIDIA GPU is visible")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(DeviceError, match=text):
            devices.find_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "driver" in str(devices.cuda_problem())


def test_a_cpu_is_keyed_by_the_threads_torch_uses() -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert devices.device_key("cpu").units == count
            assert devices.limits("cpu").units == count
    finally:
        torch.set_num_threads(threads)


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, autofa.runtime, autofa.runtime.extension, autofa.runtime.kernels; " + (
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", ["/nowhere/autofa_runtime.so", __file__])
def test_an_unusable_library_is_said_not_raised(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "runtime_library", lambda: Path(path))
    monkeypatch.setattr(extension, "_library", None)
    monkeypatch.setattr(extension, "_failure", None)
    assert not extension.available()
    assert path in str(extension.reason())
    with pytest.raises(LaunchError, match="not usable"):
        extension.counters()
