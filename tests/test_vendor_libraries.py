"""flash-attn and ffpa-attn as candidates, by stand-ins that compute in their layout and corner."""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dispatch_world import inputs, no_defaults, problem, reference, row, stale, store
from runtime_variants import require_runtime
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from vendor_libraries import LIBRARY_KERNELS, VERSIONS, installed, write_distribution

import autofa
from autofa import settings
from autofa.bench.client import Worker
from autofa.cli import _run
from autofa.device import cpu_limits
from autofa.dispatch import state
from autofa.dispatch.table import Table
from autofa.errors import LaunchError, NotApplicableError
from autofa.kernels import REGISTRY
from autofa.kernels.vendor import BASELINE, VendorKernel
from autofa.problem import Problem
from autofa.runtime import extension, kernels, vendors
from autofa.store.repository import Repository

FLASH = ("flash_attn2.fwd", "flash_attn3.fwd", "fa3_fwd.fwd", "flash_attn4.fwd")
SLUGS = (*FLASH, "ffpa.triton", "ffpa.cute")
# A shape that each serves, as B,Hq/Hkv,Nq/Nk,D.
WIDTH = dict.fromkeys(FLASH, 64) | {"ffpa.triton": 264, "ffpa.cute": 320}
LENGTH = dict.fromkeys(FLASH, 33) | {"ffpa.triton": 512, "ffpa.cute": 33}


@pytest.fixture(autouse=True)
def library_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    require_runtime()
    folder = tmp_path / "site-packages"
    with torch.no_grad(), installed(folder, monkeypatch), no_defaults():
        state.reload()
        yield folder
    state.reload()


def shape(slug: str, heads: str = "4/2", lengths: str = "", width: int = 0) -> Problem:
    text = f"2,{heads},{lengths or LENGTH[slug]},{width or WIDTH[slug]}"
    return problem(text, dtype="bf16")


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


def bias(p: Problem) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NaN in rows with nothing to attend to
        return causal_lower_right(p.seqlen_q, p.seqlen_k)


def lower_right_mask(p: Problem) -> Tensor:
    visible = torch.ones(p.seqlen_q, p.seqlen_k, dtype=torch.bool)
    return visible.tril(p.seqlen_k - p.seqlen_q)


@pytest.mark.parametrize("slug", SLUGS)
@pytest.mark.parametrize("scale", [None, -0.7, 0.0])
@pytest.mark.parametrize("causal", [False, True])
def test_what_sdpa_means(slug: str, causal: bool, scale: float | None) -> None:
    """Grouped heads, any scale, both orders in memory, three dims; strides as all kernels give."""
    for p in (shape(slug, "3/1"), shape(slug))[slug == "ffpa.triton" :]:
        q, k, v = inputs(p)
        for order in ("bhnd", "bnhd"):
            if order == "bnhd":
                q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
            with autofa.force_kernel(slug):
                out = autofa.attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
                flat = autofa.attention(
                    q[0], k[0], v[0], is_causal=causal, scale=scale, enable_gqa=True
                )
            expected = reference(q, k, v, None, causal, scale, True)
            close(out, expected)
            close(flat, expected[0])
            assert out.stride() == torch.empty_like(q).stride()


@pytest.mark.parametrize("slug", [*FLASH, "ffpa.triton"])
def test_the_lower_right_corner(slug: str) -> None:
    p = shape(slug, lengths="5/530")
    q, k, v = inputs(p)
    with autofa.force_kernel(slug):
        out = autofa.attention(q, k, v, bias(p), enable_gqa=True)
    close(out, reference(q, k, v, lower_right_mask(p), enable_gqa=True))


@pytest.mark.parametrize("slug", SLUGS)
def test_the_upper_left_corner_is_refused_unless_it_is_square(slug: str) -> None:
    q, k, v = inputs(shape(slug, lengths="600/700"))
    with autofa.force_kernel(slug), pytest.raises(NotApplicableError, match="seqlen_q"):
        autofa.attention(q, k, v, is_causal=True, enable_gqa=True)
    # The runtime too, which alone sees lengths as they are.
    with pytest.raises(RuntimeError, match=r"corner|seqlen_q"):
        run(slug, q, k, v, is_causal=True, enable_gqa=True)


def run(slug: str, q: Tensor, k: Tensor, v: Tensor, **named: bool) -> Tensor:
    return kernels.run(kernels.load_vendor(slug), q, k, v, **named)  # type: ignore[arg-type]


@pytest.mark.parametrize("slug", SLUGS)
@pytest.mark.parametrize("order", ["bhnd", "bnhd"])
def test_the_callers_memory_is_what_the_library_reads_and_writes(
    slug: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import attention_stand_in

    monkeypatch.setattr("autofa.runtime.vendors.ffpa._writes_to", lambda device: True)
    q, k, v = inputs(shape(slug))
    if order == "bnhd":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    out = run(slug, q, k, v, enable_gqa=True)
    called = attention_stand_in.calls[-1]
    assert called[:3] == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    # FFPA's CuTe kernels write contiguous (B, N, H, D) only.
    assert (called[3] == out.data_ptr()) == (slug != "ffpa.cute" or order == "bnhd")


@pytest.mark.parametrize("slug", FLASH)
def test_a_stride_that_says_nothing_is_no_hindrance(slug: str) -> None:
    """That of a dim of size 1: one query out of many, say."""
    q, k, v = inputs(shape(slug, lengths="1/33"))
    odd = q.as_strided(q.shape, (q.stride(0), q.stride(1), 7, 1))
    close(run(slug, odd, k, v, enable_gqa=True), reference(q, k, v, enable_gqa=True))


@pytest.mark.parametrize("slug", FLASH)
def test_head_dims_are_padded(slug: str) -> None:
    for width in (20, 1):
        q, k, v = inputs(shape(slug, width=width))
        with autofa.force_kernel(slug):
            out = autofa.attention(q, k, v, is_causal=True, enable_gqa=True)
        close(out, reference(q, k, v, None, True, None, True))
        assert out.stride() == torch.empty_like(q).stride()


def test_unequal_head_dims() -> None:
    q, k, v = inputs(problem("1,4/2,33,64/48", dtype="bf16"))
    close(run("flash_attn4.fwd", q, k, v, enable_gqa=True), reference(q, k, v, enable_gqa=True))
    close(run("fa3_fwd.fwd", q, k, v, enable_gqa=True), reference(q, k, v, enable_gqa=True))
    with autofa.force_kernel("flash_attn2.fwd"), pytest.raises(NotApplicableError, match="head_di"):
        autofa.attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("slug", SLUGS)
def test_what_they_cannot_read_is_refused(slug: str) -> None:
    q, k, v = inputs(shape(slug))
    wide = torch.zeros(*k.shape[:3], k.shape[3] + 1, dtype=k.dtype)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    for arguments, why in (
        ((q, wide[..., :-1], v), "16 bytes"),
        ((q, k[:, :, :1].expand(k.shape), v), "strides of 0"),
        ((q, k, v, mask), "mask"),
        ((q.float(), k.float(), v.float()), "dtype"),
    ):
        with autofa.force_kernel(slug), pytest.raises(NotApplicableError, match=why):
            autofa.attention(*arguments, enable_gqa=True)
    with autofa.force_kernel("fa3_fwd.fwd"), pytest.raises(NotApplicableError, match="dtype f16"):
        autofa.attention(*(t.half() for t in (q, k, v)), enable_gqa=True)


@pytest.mark.parametrize("slug", FLASH[:3])
def test_rows_that_see_nothing(slug: str) -> None:
    p = shape(slug, lengths="9/5")
    q, k, v = inputs(p)
    with autofa.force_kernel(slug):
        out = autofa.attention(q, k, v, bias(p), enable_gqa=True)
    assert (out[:, :, :4] == 0).all()
    close(out, reference(q, k, v, lower_right_mask(p), enable_gqa=True))


def test_rows_that_see_nothing_where_nobody_vouches_for_them() -> None:
    q, k, v = inputs(shape("flash_attn4.fwd", lengths="9/5"))
    with pytest.raises(RuntimeError, match="nothing to attend"):
        run("flash_attn4.fwd", q, k, v, is_causal=True, lower_right=True, enable_gqa=True)


@pytest.mark.parametrize("slug", SLUGS)
@pytest.mark.parametrize("rank", [3, 4])
def test_the_log_sum_exp(slug: str, rank: int) -> None:
    p = shape(slug, lengths="3/600")
    q, k, v = inputs(p)
    if rank == 3:
        q, k, v = q[1], k[1], v[1]
    number = kernels.load_vendor(slug)
    out, lse = torch.ops.autofa.run_with_lse.default(
        number, q, k, v, None, False, -0.4, True, False
    )
    close(out, reference(q, k, v, None, False, -0.4, True))
    scores = q.double() @ k.double().repeat_interleave(2, -3).mT * -0.4
    assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)
    assert lse.is_contiguous()
    close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("slug", FLASH[:3])
def test_the_log_sum_exp_of_rows_that_see_nothing(slug: str) -> None:
    q, k, v = inputs(shape(slug, lengths="9/5"))
    _, lse = torch.ops.autofa.run_with_lse.default(
        kernels.load_vendor(slug), q, k, v, None, True, None, True, True
    )
    assert (lse[:, :, :4] == float("-inf")).all()
    assert lse[:, :, 4:].isfinite().all()


# ---- as the winner of a bucket ----


def winner(slug: str, p: Problem) -> None:
    """A database in which `slug` is twice as fast as SDPA at that shape."""
    store([row(slug, p, 0.5), row(BASELINE, p, 1.0)])


def table_of_process() -> Table:
    table = state.STATE.table
    assert table is not None
    return table


def library_calls() -> int:
    import attention_stand_in

    return len(attention_stand_in.calls)


@pytest.mark.parametrize("slug", ["flash_attn4.fwd", "ffpa.cute"])
def test_a_winner_is_imported_in_the_background(slug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.load_vendor(slug)
    p = shape(slug)
    q, k, v = inputs(p)
    expected = reference(q, k, v, enable_gqa=True)
    winner(slug, p)
    # As in a process that has not imported it; torch has the operator already.
    monkeypatch.setattr(vendors, "_loaded", set())
    monkeypatch.setattr(vendors, "_register", lambda slug, kernel: None)
    importing = threading.Event()

    def slow(name: str) -> vendors.Kernel:
        assert importing.wait(20)
        return vendors.Kernel(lambda *_: None)

    monkeypatch.setattr(f"autofa.runtime.vendors.{slug.partition('.')[0]}.load", slow)
    before = library_calls()
    for _ in range(2):
        close(autofa.attention(q, k, v, enable_gqa=True), expected)
    assert library_calls() == before
    importing.set()
    assert table_of_process().wait(20)
    close(autofa.attention(q, k, v, enable_gqa=True), expected)
    assert library_calls() == before + 1


def test_a_library_that_does_not_import_costs_no_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vendors, "_loaded", set())
    monkeypatch.setattr(vendors, "_failures", {})

    def broken(name: str) -> vendors.Kernel:
        raise OSError("libcudart.so.99: cannot open shared object file\nand more")

    monkeypatch.setattr("autofa.runtime.vendors.flash_attn2.load", broken)
    p = shape("flash_attn2.fwd")
    q, k, v = inputs(p)
    store(
        [row("flash_attn2.fwd", p, 0.3), row("torch.flash", p, 0.5), row(BASELINE, p, 1.0)],
    )
    caplog.set_level(logging.WARNING, logger="autofa")
    for _ in range(3):
        close(autofa.attention(q, k, v, enable_gqa=True), reference(q, k, v, enable_gqa=True))
        assert table_of_process().wait(20)
    assert [r.getMessage() for r in caplog.records] == [
        "flash_attn2.fwd is not usable: libcudart.so.99: cannot open shared object file; another "
        "kernel answers"
    ]
    told = autofa.explain(q, k, v, enable_gqa=True)
    assert told.kernel == "torch.flash"
    notes = {note.kernel: note.reason for note in told.candidates}
    assert "not usable: libcudart" in notes["flash_attn2.fwd"]
    with pytest.raises(LaunchError, match="not usable: libcudart"):
        kernels.load_vendor("flash_attn2.fwd")


def test_an_old_flash_attn_is_not_usable(
    library_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendors, "_loaded", set())
    monkeypatch.setattr(vendors, "_failures", {})
    write_distribution(library_folder, "flash-attn", "2.5.9")
    with pytest.raises(LaunchError, match=r"2\.5\.9 is older than 2\.6"):
        kernels.load_vendor("flash_attn2.fwd")


def test_another_versions_function_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    import flash_attn.cute.interface as interface

    monkeypatch.setattr(vendors, "_loaded", set())
    monkeypatch.setattr(vendors, "_failures", {})
    monkeypatch.setattr(interface, "_flash_attn_fwd", lambda q, k, v, out: out)
    with pytest.raises(LaunchError, match="no parameter softmax_scale, causal, lse"):
        kernels.load_vendor("flash_attn4.fwd")


def test_a_library_that_fails_at_a_call_costs_no_call(caplog: pytest.LogCaptureFixture) -> None:
    from attention_stand_in import FAILING_LENGTH

    slug = "flash_attn3.fwd"
    kernels.load_vendor(slug)
    p = shape(slug, lengths=str(FAILING_LENGTH))
    q, k, v = inputs(p)
    winner(slug, p)
    caplog.set_level(logging.WARNING, logger="autofa")
    before = extension.counters()
    for _ in range(3):
        close(autofa.attention(q, k, v, enable_gqa=True), reference(q, k, v, enable_gqa=True))
    after = extension.counters()
    assert after["fallback"] == before["fallback"] + 1  # from then on the key is SDPA's
    assert ["a length that this library fails at" in r.getMessage() for r in caplog.records] == [
        True
    ]
    with autofa.force_kernel(slug), pytest.raises(NotApplicableError, match=slug):
        autofa.attention(q, k, v, enable_gqa=True)


def test_another_version_makes_rows_invalid(library_folder: Path) -> None:
    slug = "flash_attn2.fwd"
    kernels.load_vendor(slug)
    p = shape(slug)
    q, k, v = inputs(p)
    winner(slug, p)
    assert autofa.explain(q, k, v, enable_gqa=True).kernel == slug
    write_distribution(library_folder, "flash-attn", "2.8.9")
    autofa.reload()
    assert autofa.explain(q, k, v, enable_gqa=True).kernel == slug
    write_distribution(library_folder, "flash-attn", "2.9.0")
    autofa.reload()
    told = autofa.explain(q, k, v, enable_gqa=True)
    assert told.kernel == BASELINE
    assert "installed is flash-attn==2.9" in str(told.candidates)
    close(autofa.attention(q, k, v, enable_gqa=True), reference(q, k, v, enable_gqa=True))


def test_rows_of_a_library_that_is_gone(library_folder: Path) -> None:
    candidate = REGISTRY.candidate("fa3_fwd.fwd")
    assert isinstance(candidate, VendorKernel)
    assert candidate.version() == "0.0"
    assert candidate in REGISTRY.legal(shape(candidate.slug), cpu_limits())
    made = stale(row(candidate.slug, shape(candidate.slug), 0.5))
    store([made, row(BASELINE, made.problem, 1.0)])
    told = autofa.explain(*inputs(made.problem), enable_gqa=True)
    assert (told.kernel, "installed is fa3-fwd==0.0" in str(told.candidates)) == (BASELINE, True)


# ---- measured ----


def test_they_are_checked_like_any_other() -> None:
    """In the worker's own process, which imports them itself: odd lengths, large scores."""
    p = problem("1,2,64,64", "causal_lower_right", dtype="bf16")
    with Worker("cpu", cpu_limits()) as worker:
        for slug in ("flash_attn2.fwd", "flash_attn4.fwd"):
            outcome = worker.check(REGISTRY.candidate(slug), None, p)
            assert outcome.ok, (slug, outcome)


def test_a_tune_measures_them() -> None:
    p = problem("1,2,64,64", dtype="bf16")
    arguments = f"tune --shape {p.shape} --dtype bf16 --no-causal --device cpu --budget 60s"
    # Of a family that does not serve this shape, so that nothing is compiled.
    assert _run([*arguments.split(), "--families", "cpu.decode"]) == 0
    with Repository.open(settings.database(settings.load()), write=False) as repository:
        rows = {found.slug: found for found in repository.rows()}
    for slug in FLASH:
        assert rows[slug].status == "ok"
        assert rows[slug].call_ms is not None
    assert rows["flash_attn4.fwd"].fingerprint == "flash-attn-4==4.0"


def test_a_head_to_head_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "bench --device cpu --B 1 --H 2 --N 64 --D 64 --dtype bf16 --iters 3 --format json"
    assert _run([*arguments.split(), "--kernels", "flash_attn[24]*"]) == 0
    found = {line["kernel"]: line["status"] for line in json.loads(capsys.readouterr().out)}
    assert found["flash_attn2.fwd"] == found["flash_attn4.fwd"] == "ok"


def test_what_is_not_installed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["kernels"]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("flash_attn2.fwd"))
    assert "2.8" in line
    assert " yes " in line


def test_nothing_is_needed_and_nothing_imported_by_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("autofa.kernels.vendor._installed", lambda library: None)
        for kernel in LIBRARY_KERNELS:
            assert kernel.not_here([cpu_limits()]) == f"{kernel.library} is not installed"
            assert kernel.library in VERSIONS
            assert kernel not in REGISTRY.legal(shape(kernel.slug), cpu_limits())


# ---- CUDA graphs ----


def test_a_capture_is_not_disturbed_by_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    made: list[int] = []

    def attend(q: Tensor, *rest: object) -> None:
        made.append(q.shape[0])

    call = vendors._compiled_before_capture(vendors.Kernel(attend, compiles=True))

    def at(length: int) -> bool:
        q = SimpleNamespace(shape=(length,), dtype=torch.half, device="cuda:0", is_cuda=True)
        return call(q, q, q, q, None, 1.0, False)  # type: ignore[arg-type]

    assert at(8)
    capturing = True
    assert at(8)
    assert not at(9)
    capturing = False
    assert at(9)
    assert made == [8, 8, 9]
