"""Look-ups in a living process: winners from the database, background builds, threads, faults."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dispatch_world import (
    assert_close,
    built,
    flash,
    inputs,
    no_defaults,
    problem,
    reference,
    store,
    tuned,
)
from runtime_variants import require_runtime
from store_samples import at
from torch.nn.attention.bias import causal_lower_right

import autofa
from autofa import settings
from autofa.device import DeviceKey
from autofa.dispatch import inspection, state, table
from autofa.dispatch.keys import key_of, problem_of_key
from autofa.dispatch.table import Table
from autofa.errors import DTypeError
from autofa.kernels import REGISTRY
from autofa.problem import bucket_of
from autofa.runtime import devices, extension
from autofa.runtime.abi import LaunchKey

SHAPE = problem("1,2,33,16")


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> None:
    require_runtime()


@pytest.fixture(autouse=True)
def _fresh(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.WARNING, logger="autofa")
    built(flash())
    state.reload()
    with torch.no_grad(), no_defaults():
        yield
    state.reload()


def own() -> int:
    return extension.counters()["own"]


def live() -> Table:
    found = state.STATE.table
    assert found is not None
    return found


def test_keys_and_problems_agree_with_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python makes of a problem is what the operator asks for."""
    asked: list[LaunchKey] = []
    monkeypatch.setattr(live(), "miss", lambda key: asked.append(key) or 0)
    for shape, mask, dtype in (
        ("1,2,33,16", "none", "f32"),
        ("3,8/2,100/300,64/40", "causal", "bf16"),
        ("2,6,5,24", "causal_lower_right", "f16"),
    ):
        p = problem(shape, mask, dtype)
        q, k, v = inputs(p)
        bias = None
        if mask == "causal_lower_right":
            p = replace(p, seqlen_k=9)
            q, k, v = inputs(p)
            bias = causal_lower_right(5, 9)
        autofa.attention(q, k, v, bias, is_causal=mask == "causal", enable_gqa=True)
        want = key_of(p, torch.get_num_threads(), graph=False, flags=0)
        assert asked[-1].as_tuple() == want.as_tuple()
        assert problem_of_key(asked[-1]) == bucket_of(p).problem


def test_the_databases_winner_serves_and_explain_names_it() -> None:
    """A small transformer, inference: issue 2, item 2."""
    torch.manual_seed(0)
    x = torch.randn(2, 40, 64)
    weights = [torch.randn(64, 192) * 0.1 for _ in range(2)]

    def model(attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        h = x
        for weight in weights:
            q, k, v = (h @ weight).view(2, 40, 3, 4, 16).permute(2, 0, 3, 1, 4)
            h = h + attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 40, 64)
        return h

    store(tuned(problem("2,4,40,16", "causal"), own_ms=0.4))
    q, k, v = (x @ weights[0]).view(2, 40, 3, 4, 16).permute(2, 0, 3, 1, 4)
    found = autofa.explain(q, k, v, is_causal=True)
    assert (found.kernel, found.rung) == (flash().slug, "measured")
    assert found.call_ms == 0.4
    before = own()
    got = model(autofa.attention)
    assert own() == before + 2
    torch.testing.assert_close(got, model(torch.nn.functional.scaled_dot_product_attention))
    assert live().counts.reads == 1
    assert live().counts.misses == 1


def test_an_untuned_machine_gets_the_embedded_default() -> None:
    family = flash().family
    object.__setattr__(family, "unmeasured", lambda problem, limits: problem.mask == "causal")
    before = own()
    q, k, v = inputs(SHAPE)
    autofa.attention(q, k, v)
    assert own() == before
    assert_close(autofa.attention(q, k, v, is_causal=True), reference(q, k, v, is_causal=True))
    assert own() == before + 1
    found = autofa.explain(q, k, v, is_causal=True)
    assert (found.kernel, found.rung, found.call_ms) == (flash().slug, "default", None)


def test_a_bucket_serves_its_neighbours() -> None:
    store(tuned(problem("1,2,32,16")))
    before = own()
    for n in (30, 32, 40):
        autofa.attention(*inputs(problem(f"1,2,{n},16")))
    autofa.attention(*inputs(problem("1,2,4096,16")))  # another bucket: far from what was measured
    assert own() == before + 3
    assert live().counts.misses == 2


def test_unaligned_calls_have_their_own_entry() -> None:
    store(tuned(SHAPE))
    q, k, v = inputs(SHAPE)
    odd = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    autofa.attention(q, k, v)
    assert_close(autofa.attention(odd, k, v), reference(q, k, v))
    assert live().counts.misses == 2


def test_sticky_until_reload() -> None:
    store(tuned(SHAPE, own_ms=2.0))
    q, k, v = inputs(SHAPE)
    autofa.attention(q, k, v)
    path = Path(settings.database(settings.load()))
    from autofa.store.repository import Repository

    with Repository.open(path, write=True) as repository:
        repository.add(tuned(SHAPE, own_ms=0.5, run="2", provenance=at(30)))
    before = own()
    autofa.attention(q, k, v)
    assert own() == before
    autofa.reload()
    autofa.attention(q, k, v)
    assert own() == before + 1


class Build:
    """A compiler that waits for a signal, then copies a library that is there."""

    def __init__(self, library: Path, fail: bool = False) -> None:
        self.may_go = threading.Event()
        self.calls = 0
        self.library = library
        self.fail = fail

    def __call__(self, requests, settings, **kw):  # type: ignore[no-untyped-def]
        from autofa.compiler import Build as Result

        self.calls += 1
        assert self.may_go.wait(20)
        ((variant, target),) = requests
        if self.fail:
            return [Result(variant, target, "compile_error", message="no such instruction")]
        return [Result(variant, target, "ok", self.library)]


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> Build:
    """cpu.flash is the measured winner, but its library is not there before `may_go` is set."""
    library = built(flash())
    compiler = Build(library)
    monkeypatch.setattr("autofa.compiler.build", compiler)
    monkeypatch.setattr(
        table,
        "library_of",
        lambda variant, target, settings: (
            library if compiler.may_go.is_set() and not compiler.fail else None
        ),
    )
    store(tuned(SHAPE))
    return compiler


def test_a_missing_winner_is_built_behind_and_swapped_in(unbuilt: Build) -> None:
    q, k, v = inputs(SHAPE)
    before = own()
    for _ in range(3):
        assert_close(autofa.attention(q, k, v), reference(q, k, v))
    assert own() == before
    explained = autofa.explain(q, k, v)
    assert explained.kernel == "torch.sdpa"
    assert "faster, but not built yet" in explained.reason
    unbuilt.may_go.set()
    assert live().wait(20)
    assert live().counts.swaps == 1
    assert_close(autofa.attention(q, k, v), reference(q, k, v))
    assert own() == before + 1
    assert unbuilt.calls == 1
    assert live().counts.misses == 1


def test_no_swap_under_deterministic_mode(unbuilt: Build) -> None:
    q, k, v = inputs(SHAPE)
    torch.use_deterministic_algorithms(True)
    try:
        first = autofa.attention(q, k, v)
        unbuilt.may_go.set()
        assert live().wait(20)
        assert torch.equal(first, autofa.attention(q, k, v))
        assert unbuilt.calls == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_build_that_fails_is_one_warning(
    unbuilt: Build, caplog: pytest.LogCaptureFixture
) -> None:
    unbuilt.fail = True
    unbuilt.may_go.set()
    q, k, v = inputs(SHAPE)
    for _ in range(3):
        assert_close(autofa.attention(q, k, v), reference(q, k, v))
    assert live().wait(20)
    autofa.attention(*inputs(problem("1,2,35,16")))
    assert live().wait(20)
    assert unbuilt.calls == 1
    (said,) = [r.message for r in caplog.records]
    assert said.startswith(f"{flash().slug} would be the fastest, but was not built: no such instr")
    assert "autofa doctor" in said


def test_warmup_builds_before_the_first_call(unbuilt: Build) -> None:
    unbuilt.may_go.set()
    (found,) = autofa.warmup(SHAPE)
    assert found.kernel == flash().slug
    misses = extension.counters()["miss"]
    before = own()
    autofa.attention(*inputs(SHAPE))
    assert own() == before + 1
    assert extension.counters()["miss"] == misses


def test_warmup_forms() -> None:
    store(tuned(SHAPE))
    q, k, v = inputs(SHAPE)
    assert autofa.warmup(q, k, v)[0].kernel == flash().slug
    assert autofa.warmup((q, k, v, None, 0.0, True), SHAPE)[1].kernel == flash().slug
    assert [e.kernel for e in autofa.warmup()] == [flash().slug]
    assert autofa.warmup((q.double(), k.double(), v.double()))[0].rung == "sdpa"
    with pytest.raises(DTypeError, match="warmup"):
        autofa.warmup("1,2,3,4")


def test_a_library_that_does_not_load_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF not really")
    monkeypatch.setattr(table, "library_of", lambda *a: broken)
    store(tuned(SHAPE))
    monkeypatch.setattr("autofa.compiler.build", Build(broken, fail=True))
    q, k, v = inputs(SHAPE)
    assert_close(autofa.attention(q, k, v), reference(q, k, v))
    assert sum("broken.so" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("same", [True, False])
def test_threads_on_a_cold_table(same: bool) -> None:
    shapes = [problem("1,2,33,16" if same else f"1,2,{2**i},16") for i in range(1, 9)]
    store([made for shape in set(shapes) for made in tuned(shape)])
    barrier = threading.Barrier(8)
    wrong: list[object] = []

    def run(shape) -> None:  # type: ignore[no-untyped-def]
        q, k, v = inputs(shape)
        barrier.wait()
        try:
            for _ in range(5):
                assert_close(autofa.attention(q, k, v), reference(q, k, v))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(shape,)) for shape in shapes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert live().counts.reads == 1
    before = own()
    for shape in shapes:
        autofa.attention(*inputs(shape))
    assert own() == before + 8


def test_nobody_waits_for_a_thread_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    store(tuned(SHAPE))
    reading, may_go = threading.Event(), threading.Event()
    real = table.gather

    def slow(device, settings):  # type: ignore[no-untyped-def]
        reading.set()
        assert may_go.wait(20)
        return real(device, settings)

    monkeypatch.setattr(table, "gather", slow)
    q, k, v = inputs(SHAPE)
    thread = threading.Thread(target=lambda: autofa.attention(q, k, v))
    thread.start()
    assert reading.wait(20)
    before = own()
    assert_close(autofa.attention(q, k, v), reference(q, k, v))  # plain SDPA, at once
    assert own() == before
    may_go.set()
    thread.join()
    autofa.attention(q, k, v)
    assert own() == before + 2


def test_a_look_up_that_breaks_is_sdpa_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(table, "resolve", lambda *a: 1 / 0)
    for n in (3, 30, 300):
        q, k, v = inputs(problem(f"1,2,{n},16"))
        assert_close(autofa.attention(q, k, v), reference(q, k, v))
    assert len(caplog.records) == 1
    assert "plain SDPA answers" in caplog.records[0].message


def test_a_deleted_library_is_a_miss_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    library = built(flash())
    kept = library.with_suffix(".kept")
    shutil.copy2(library, kept)
    store(tuned(SHAPE))
    compiler = Build(library, fail=True)
    compiler.may_go.set()
    monkeypatch.setattr("autofa.compiler.build", compiler)
    library.unlink()
    try:
        if table.library_of(flash(), flash().target(devices.limits("cpu")), settings.load()):
            pytest.skip("the prebuilt library is there too")
        q, k, v = inputs(SHAPE)
        before = own()
        assert_close(autofa.attention(q, k, v), reference(q, k, v))
        assert own() == before
        assert live().wait(20)
    finally:
        kept.rename(library)
    autofa.reload()
    autofa.attention(q, k, v)
    assert own() == before + 1


def test_explain_problem_speaks_of_any_device() -> None:
    from autofa.device import cuda_limits

    h200 = DeviceKey("cuda", "NVIDIA H200", "sm_90", 132, 140)
    asked = replace(problem("1,8,1024,64", dtype="f16"), device="cuda")
    found = inspection.explain_problem(asked, h200, cuda_limits("sm_90a"), "graph")
    assert json.loads(found.to_json())["rung"] in ("sdpa", "seed", "default")
    assert REGISTRY.find(found.kernel) is not None
