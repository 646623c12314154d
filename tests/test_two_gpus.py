"""Calls on a GPU that is not the current one: which device decides; on real ones, the results."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dispatch_world import built, flash, row
from runtime_variants import require_runtime

import autofa
from autofa import settings
from autofa.compiler import fingerprint
from autofa.dispatch import table as table_module
from autofa.dispatch.keys import device_index, key_of
from autofa.dispatch.table import Table
from autofa.errors import DeviceError
from autofa.kernels import REGISTRY, Candidate
from autofa.kernels.family import Variant
from autofa.problem import Problem
from autofa.runtime import devices, extension, kernels, vendors
from autofa.settings import Settings
from autofa.store.repository import Repository

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


@pytest.mark.usefixtures("two")
def test_two_unlike_cards_have_each_their_own_winner() -> None:
    require_runtime()
    problem = Problem("bf16", 1, 8, 8, 1024, 1024, 64, 64)
    winners = ("torch.flash", "torch.efficient")
    with Repository.open(settings.database(settings.load()), write=True) as repository:
        for ordinal, best in enumerate(winners):
            device = devices.device_key(f"cuda:{ordinal}")
            times = {"torch.sdpa": 1.0, "torch.flash": 0.9, "torch.efficient": 0.9, best: 0.5}
            repository.add([row(s, problem, ms, device=device) for s, ms in times.items()])
    table = Table(settings.load())
    found = [table.miss(key_of(problem, i, graph=False, flags=0)) for i in (0, 1)]
    assert found == [kernels.load_vendor(best) for best in winners]


@pytest.mark.usefixtures("two")
def test_a_missing_winner_is_built_and_swapped_in_for_each_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_runtime()
    problem = Problem("bf16", 1, 8, 8, 1024, 1024, 64, 64)
    own = kernels.load_vendor("torch.efficient")  # stands for the variant's library
    variant = REGISTRY.family("mma.split_q").default_variant(problem, devices.limits("cuda:0"))
    assert variant is not None
    present: set[str] = set()
    asked: list[str] = []

    def load(candidate: Candidate, library: Path | None) -> int:
        return own if library else kernels.load_vendor(candidate.slug)

    def library_of(built: Variant, target: str, _: Settings) -> Path | None:
        return Path(target) if target in present else None

    monkeypatch.setattr(table_module, "kernels", SimpleNamespace(load=load, SDPA=kernels.SDPA))
    monkeypatch.setattr(table_module, "library_of", library_of)
    table = Table(settings.load())
    monkeypatch.setattr(table._builder, "request", lambda variant, target: asked.append(target))
    with Repository.open(settings.database(settings.load()), write=True) as repository:
        for place in (table.place("cuda", 0), table.place("cuda", 1)):
            mark = fingerprint(variant, variant.target(place.limits))
            rows = [row(variant.slug, problem, 0.5, device=place.device, fingerprint=mark)]
            repository.add([*rows, row("torch.sdpa", problem, 1.0, device=place.device)])
    table._evidence.clear()
    keys = [key_of(problem, index, graph=False, flags=0) for index in (0, 1)]
    for key in keys:
        extension.table_set(key, table.miss(key))
    assert asked == ["sm_90a", "sm_89"]
    for target, answers in (("sm_89", [kernels.SDPA, own]), ("sm_90a", [own, own])):
        present.add(target)
        table._swap((variant, target))
        assert [extension.table_get(key) for key in keys] == answers
    extension.table_clear()


@pytest.mark.usefixtures("two")
def test_a_gpu_is_found_by_its_uuid_whatever_its_ordinal(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"cuda:0": "b1", "cuda:1": "a0"}
    monkeypatch.setattr(devices, "uuid_of", present.__getitem__)
    assert devices.cuda_names() == ("cuda:0", "cuda:1")
    assert devices.cuda_of_uuid("a0") == "cuda:1"
    assert devices.cuda_of_uuid("b1") == "cuda:0"
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES"):
        devices.cuda_of_uuid("c2")


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


@pytest.mark.gpu2
@pytest.mark.parametrize("slug", ["torch.flash", "torch.efficient", "torch.cudnn", "torch.unfused"])
def test_each_backend_of_torch_on_the_second_gpu(slug: str) -> None:
    require_runtime()
    q, k, v = (torch.randn(2, 4, 128, 64, device="cuda:1", dtype=torch.bfloat16) for _ in "qkv")
    with torch.no_grad(), autofa.force_kernel(slug):
        out = autofa.attention(q, k, v, is_causal=True)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu2
def test_a_library_in_python_finds_the_tensors_device_and_stream_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_runtime()
    slug = "flash_attn2.fwd"
    if not vendors.pending(slug):
        pytest.skip(f"{slug} is loaded in this process already")
    seen: list[tuple[int, int]] = []

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scale: float,
        causal: bool,
    ) -> None:
        seen.append((torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream))
        out.zero_()

    adapter = SimpleNamespace(load=lambda name: vendors.Kernel(attend))
    monkeypatch.setitem(sys.modules, "autofa.runtime.vendors.flash_attn2", adapter)
    kernel = kernels.load_vendor(slug)
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda:1", dtype=torch.bfloat16) for _ in "qkv")
    stream = torch.cuda.Stream("cuda:1")
    with torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda.set_device(0)
        kernels.run(kernel, q, k, v)
    assert seen == [(1, stream.cuda_stream)]
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu2
@pytest.mark.parametrize("trains", [False, True])
def test_threads_on_both_gpus_at_once(trains: bool) -> None:
    require_runtime()
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def work(ordinal: int, seed: int) -> None:
        try:
            device = torch.device("cuda", ordinal)
            stream = torch.cuda.Stream(device)
            generator = torch.Generator(device).manual_seed(seed)
            barrier.wait(60)
            for length in (64, 129, 512, 1000) * 5:
                with torch.cuda.stream(stream):
                    torch.cuda.set_device(0)
                    q, k, v = (
                        torch.randn(
                            (2, 4, length, 64),
                            generator=generator,
                            device=device,
                            dtype=torch.float32,
                        ).bfloat16()
                        for _ in "qkv"
                    )
                    q.requires_grad_(trains)
                    out = autofa.attention(q, k, v, is_causal=True)
                    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                    torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)
                    if trains:
                        (ours,) = torch.autograd.grad(out.sum(), q)
                        (theirs,) = torch.autograd.grad(want.sum(), q)
                        torch.testing.assert_close(ours, theirs, atol=5e-2, rtol=5e-2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i % 2, i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not failures


@pytest.mark.gpu2
@pytest.mark.slow
def test_a_tune_of_both_takes_little_more_than_half_the_time() -> None:
    code = Path(__file__).resolve().parents[1] / "benchmarks" / "tune_all.py"
    done = subprocess.run([sys.executable, str(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _train_in_parallel(folder: Path, kind: str, slug: str) -> None:
    code = Path(__file__).with_name("parallel_training.py")
    environment = {
        **os.environ,
        "PYTHONPATH": str(code.parents[1]),
        "AUTOFA_FORCE_KERNEL": slug,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(code)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "meeting"), kind],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)


@pytest.mark.slow
def test_a_data_parallel_step_has_the_gradients_of_the_whole_batch(tmp_path: Path) -> None:
    require_runtime()
    built(flash())
    _train_in_parallel(tmp_path, "cpu", flash().slug)


@pytest.mark.gpu2
@pytest.mark.nvcc
def test_a_data_parallel_step_on_two_gpus(tmp_path: Path) -> None:
    problem = Problem("bf16", 2, 2, 2, 33, 33, 64, 64, "causal")
    variant = REGISTRY.family("mma.split_q").default_variant(problem, devices.limits("cuda:1"))
    assert variant is not None
    _train_in_parallel(tmp_path, "cuda", variant.slug)
