"""Calls on a GPU that is not the current one: which device decides; on real ones, the results."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from runtime_variants import require_runtime

import autofa
from autofa import settings
from autofa.dispatch.keys import device_index, key_of
from autofa.dispatch.table import Table
from autofa.errors import DeviceError
from autofa.problem import Problem
from autofa.runtime import devices

GIB = 1 << 30
_PRESENT = (
    SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 * GIB
    ),
    SimpleNamespace(
        name="NVIDIA L20", major=8, minor=9, multi_processor_count=92, total_memory=48 * GIB
    ),
)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with two different GPUs, the first of which is current."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: _PRESENT[i])
    devices._cuda_key.cache_clear()
    yield
    devices._cuda_key.cache_clear()


@pytest.mark.usefixtures("two")
def test_the_tensors_device_decides_not_the_current_one() -> None:
    table = Table(settings.load())
    problem = Problem("bf16", 1, 8, 8, 1024, 1024, 64, 64)
    places = []
    for ordinal in (0, 1):
        index = device_index(torch.device("cuda", ordinal))
        assert index == ordinal
        assert key_of(problem, index, graph=False, flags=0).device_index == ordinal
        places.append(table.place("cuda", index))
    assert [place.device.name for place in places] == ["NVIDIA H200", "NVIDIA L20"]
    assert [place.limits.arch for place in places] == ["sm_90a", "sm_89"]
    assert [place.limits.units for place in places] == [132, 92]
    assert places[0].limits.smem_per_block > places[1].limits.smem_per_block
    assert device_index(torch.device("cuda")) == 0


@pytest.mark.gpu2
@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_a_call_on_the_second_gpu(side_stream: bool, trains: bool) -> None:
    require_runtime()
    assert torch.cuda.current_device() == 0
    second = torch.device("cuda", 1)
    q, k, v = (torch.randn(2, 8, 257, 64, device=second, dtype=torch.bfloat16) for _ in "qkv")
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    stream = torch.cuda.Stream(second) if side_stream else torch.cuda.current_stream(second)
    stream.wait_stream(torch.cuda.default_stream(second))
    with torch.cuda.stream(stream):
        torch.cuda.set_device(0)
        leaf = q.clone().requires_grad_(trains)
        out = autofa.attention(leaf, k, v, is_causal=True)
        if trains:
            out.sum().backward()
    torch.cuda.synchronize(second)
    assert out.device == second
    torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)
    if trains:
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
    assert torch.cuda.current_device() == 0
    with pytest.raises(DeviceError, match="one device"):
        autofa.attention(q, k.to("cuda:0"), v)
