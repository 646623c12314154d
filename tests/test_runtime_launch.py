"""Variant libraries: what is loaded, how it is called, and what happens when it refuses."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runtime_variants import BREAKS, CONSTANT, NAIVE, REFUSES, build, require_runtime
from torch.nn.functional import scaled_dot_product_attention as sdpa

from autofa.errors import LaunchError
from autofa.runtime import extension


@pytest.fixture(scope="module")
def naive(tmp_path_factory: pytest.TempPathFactory) -> int:
    require_runtime()
    path = build(tmp_path_factory.mktemp("naive"), "test.naive", NAIVE)
    return extension.add_library(str(path), "test.naive", 4)


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> int:
    require_runtime()
    path = build(tmp_path_factory.mktemp("constant"), "test.constant", CONSTANT, workspace=256)
    return extension.add_library(str(path), "test.constant", 16)


@pytest.fixture(scope="module")
def refuses(tmp_path_factory: pytest.TempPathFactory) -> int:
    require_runtime()
    path = build(tmp_path_factory.mktemp("refuses"), "test.refuses", REFUSES)
    return extension.add_library(str(path), "test.refuses", 1)


@pytest.fixture(autouse=True)
def clean_table() -> Iterator[None]:
    require_runtime()
    extension.table_clear()
    yield
    extension.set_miss(None)
    extension.table_clear()


def fwd(*arguments: object, **options: object) -> torch.Tensor:
    return torch.ops.autofa.fwd.default(*arguments, **options)


def run(*arguments: object, **options: object) -> torch.Tensor:
    return torch.ops.autofa.run.default(*arguments, **options)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    return sdpa(q.double(), k.double(), v.double(), mask, enable_gqa=True).float()


def qkv(*, heads: int = 2, heads_kv: int = 2, d_v: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, 5, 8), (2, heads_kv, 7, 8), (2, heads_kv, 7, d_v))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def test_a_variant_gets_the_whole_call(naive: int) -> None:
    q, k, v = qkv(heads=6, heads_kv=2, d_v=4)
    corner = torch.ones(5, 7, dtype=torch.bool)
    cases = (
        ({}, None),
        ({"is_causal": True}, corner.tril()),
        ({"is_causal": True, "lower_right": True}, corner.tril(2)),
        ({"attn_mask": corner.tril(1)}, corner.tril(1)),
    )
    for options, mask in cases:
        out = run(naive, q, k, v, enable_gqa=True, **options)
        torch.testing.assert_close(out, reference(q, k, v, mask), msg=str(options))
    for scale in (0.0, -0.5, 3.0):
        expected = sdpa(q.double(), k.double(), v.double(), scale=scale, enable_gqa=True)
        torch.testing.assert_close(run(naive, q, k, v, None, False, scale, True), expected.float())


@pytest.mark.parametrize("kernel", ["own", "torch.sdpa", "torch.flash"])
def test_a_scale_of_nan_gives_nan(kernel: str, naive: int) -> None:
    number = naive if kernel == "own" else extension.add_vendor(kernel)
    q, k, v = qkv()
    for out in (run(number, q, k, v, scale=float("nan")), fwd(q, k, v, scale=float("nan"))):
        assert out.shape == q.shape
        assert out.isnan().all()


@pytest.mark.parametrize(
    "shape",
    [
        (5, 7),
        (1, 7),
        (5, 1),
        (1, 1),
        (1, 1, 1, 7),
        (2, 1, 1, 7),
        (1, 2, 5, 1),
        (2, 5, 7),
        (2, 2, 5, 7),
    ],
)
def test_masks_broadcast(naive: int, shape: tuple[int, ...]) -> None:
    q, k, v = qkv()
    additive = torch.randn(shape)
    torch.testing.assert_close(run(naive, q, k, v, additive), reference(q, k, v, additive.double()))
    visible = additive > -0.5
    torch.testing.assert_close(run(naive, q, k, v, visible), reference(q, k, v, visible))
    sliced = torch.randn(*shape[:-1], 8)[..., 8 - shape[-1] :]
    torch.testing.assert_close(run(naive, q, k, v, sliced), reference(q, k, v, sliced.double()))


def test_rows_that_see_nothing_are_zero(naive: int) -> None:
    q, k, v = qkv()
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    assert (run(naive, q, k, v, mask)[:, :, 2] == 0).all()
    assert (fwd(q, k, v, mask)[:, :, 2] == 0).all()


def layouts(shape: tuple[int, int, int, int]) -> dict[str, torch.Tensor]:
    b, h, n, d = shape
    big = torch.randn(b + 1, h + 1, n + 1, d + 3)
    return {
        "contiguous": torch.randn(shape),
        "bnhd": torch.randn(b, n, h, d).transpose(1, 2),
        "hbnd": torch.randn(h, b, n, d).transpose(0, 1),
        "nbhd": torch.randn(n, b, h, d).permute(1, 2, 0, 3),
        "sliced": big[1:, 1:, 1:, 3:],
        "steps": torch.randn(b, 2 * h, n, d)[:, ::2],
        "packed": torch.randn(b, n, 3, h, d).unbind(2)[1].transpose(1, 2),
        "expanded": torch.randn(1, h, n, d).expand(shape),
        "overlapping": torch.randn(4 * b * h * n * d).as_strided(shape, (7, 5, 3, 1)),
    }


@pytest.mark.parametrize("kernel", ["own", "torch.sdpa", "torch.flash", "torch.unfused"])
def test_every_layout_gives_the_same_numbers_and_the_promised_strides(
    kernel: str, naive: int
) -> None:
    number = naive if kernel == "own" else extension.add_vendor(kernel)
    for name, q in layouts((2, 3, 4, 8)).items():
        for other, k in layouts((2, 3, 6, 8)).items():
            v = layouts((2, 3, 6, 8))[other]
            out = run(number, q, k, v)
            assert out.stride() == torch.empty_like(q).stride(), (name, other)
            torch.testing.assert_close(out, reference(q, k, v), msg=f"{name}, {other}")


def test_sizes_of_one_and_another_head_dim_keep_the_order(naive: int) -> None:
    sdpa_id = extension.add_vendor("torch.sdpa")
    for shape in ((1, 3, 4, 8), (2, 1, 4, 8), (2, 3, 1, 8), (1, 1, 1, 8), (1, 1, 4, 8)):
        for name, q in layouts(shape).items():
            b, h, n, _ = shape
            k, v = torch.randn(b, h, 6, 8), torch.randn(b, h, 6, 5)
            own, vendor = run(naive, q, k, v), run(sdpa_id, q, k, v)
            assert own.stride() == vendor.stride(), (name, shape)
            wanted = [
                s
                for s, size in zip(torch.empty_like(q[..., :5]).stride(), shape, strict=True)
                if size > 1
            ]
            assert [s for s, size in zip(own.stride(), shape, strict=True) if size > 1] == wanted
    assert n == 4


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_other_ranks(rank: int, naive: int) -> None:
    extension.set_miss(lambda key: naive)
    shape = (2, 3, 2, 5, 8)[-rank:]
    q, k, v = (torch.randn(shape) for _ in range(3))
    out = fwd(q, k, v)
    torch.testing.assert_close(out, sdpa(q.double(), k.double(), v.double()).float())
    assert out.is_contiguous()


def test_dim_minus_three_is_the_heads(naive: int) -> None:
    q, k = torch.randn(6, 5, 8), torch.randn(2, 7, 8)
    out = run(naive, q, k, k, enable_gqa=True)
    torch.testing.assert_close(
        out, reference(q, k.repeat_interleave(3, 0), k.repeat_interleave(3, 0))
    )


def test_a_refusal_goes_to_sdpa_and_is_counted(refuses: int) -> None:
    q, k, v = qkv()
    extension.set_miss(lambda key: refuses)
    before = extension.counters()
    torch.testing.assert_close(fwd(q, k, v), reference(q, k, v))
    after = extension.counters()
    assert after["fallback"] == before["fallback"] + 1
    assert after["own"] == before["own"]
    with pytest.raises(RuntimeError, match=r"test\.refuses cannot serve this call"):
        run(refuses, q, k, v)


def test_alignment_is_checked_on_every_call(constant: int) -> None:
    q, k, v = qkv()
    extension.set_miss(lambda key: constant)
    assert (fwd(q, k, v) == 7).all()
    odd = torch.randn(2, 2, 7, 9)[..., :8]
    torch.testing.assert_close(fwd(q, odd, v), reference(q, odd, v))
    with pytest.raises(RuntimeError, match="aligned"):
        run(constant, q, odd, v)
    # The output's rows would be 20 bytes apart.
    v5 = torch.randn(2, 2, 7, 8)[..., :5]
    with pytest.raises(RuntimeError, match="aligned"):
        run(constant, q, k, v5)


def test_a_broken_context_is_an_error(tmp_path: Path) -> None:
    path = build(tmp_path, "test.breaks", BREAKS)
    kernel = extension.add_library(str(path), "test.breaks", 1)
    q, k, v = qkv()
    extension.set_miss(lambda key: kernel)
    with pytest.raises(RuntimeError, match=r"test\.breaks: got CUDA error 700"):
        fwd(q, k, v)


def test_the_log_sum_exp(naive: int, refuses: int) -> None:
    q, k, v = qkv(d_v=4)
    out, lse = torch.ops.autofa.run_with_lse.default(naive, q, k, v, None, True)
    scores = (q.double() @ k.double().mT / 8**0.5).masked_fill(
        ~torch.ones(5, 7, dtype=torch.bool).tril(), -torch.inf
    )
    torch.testing.assert_close(lse, scores.logsumexp(-1).float())
    torch.testing.assert_close(out, run(naive, q, k, v, None, True))
    for kernel in (refuses, 0):
        with pytest.raises(RuntimeError, match="cannot serve this call"):
            torch.ops.autofa.run_with_lse.default(kernel, q, k, v)


def test_what_is_loaded_must_be_what_was_asked_for(tmp_path: Path) -> None:
    good = build(tmp_path, "test.good", REFUSES)
    first = extension.add_library(str(good), "test.good", 1)
    assert extension.add_library(str(good), "test.good", 1) == first
    with pytest.raises(LaunchError, match=r"got test\.good; supported: test\.other"):
        extension.add_library(str(good), "test.other", 1)
    with pytest.raises(LaunchError, match="cannot open shared object file"):
        extension.add_library(str(tmp_path / "absent.so"), "test.good", 1)
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(LaunchError, match=r"text\.so"):
        extension.add_library(str(tmp_path / "text.so"), "test.good", 1)
    old = build(
        tmp_path, "test.old", "#undef AUTOFA_ABI_VERSION\n#define AUTOFA_ABI_VERSION 99\n" + REFUSES
    )
    with pytest.raises(LaunchError, match="got ABI 99"):
        extension.add_library(str(old), "test.old", 1)


def test_ids_that_do_not_exist() -> None:
    q, k, v = qkv()
    for number in (-1, 60_000, 1 << 40):
        with pytest.raises(RuntimeError, match="load it first"):
            run(number, q, k, v)
    with pytest.raises(LaunchError, match="no adapter"):
        extension.add_vendor("torch.nothing")


def test_threads_are_torchs(naive: int) -> None:
    """The executor works from several Python threads, and inside a parallel region of torch."""
    q, k, v = qkv(heads=8, heads_kv=8)
    expected = reference(q, k, v)
    failures: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            if not torch.allclose(run(naive, q, k, v), expected, atol=1e-5):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


class _MallocInfo(ctypes.Structure):
    # glibc's struct mallinfo2; uordblks is the eighth of its ten fields.
    _fields_ = [("before", ctypes.c_size_t * 7), ("used", ctypes.c_size_t * 3)]


def _allocated() -> int:
    """Bytes that malloc has given out. Python's own small objects come from elsewhere."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("needs glibc 2.33 or newer to count allocations")
    library.mallinfo2.restype = _MallocInfo
    used: int = library.mallinfo2().used[0]
    return used


@pytest.mark.parametrize("route", ["own", "workspace", "refused", "sdpa", "flash", "error", "lse"])
def test_nothing_leaks(route: str, naive: int, constant: int, refuses: int) -> None:
    q, k, v = qkv(heads=1, heads_kv=1)
    mask = torch.ones(5, 7, dtype=torch.bool)

    def call() -> None:
        if route == "own":
            run(naive, q, k, v, mask, False, 0.5)
        elif route == "workspace":
            run(constant, q, k, v)
        elif route == "refused":
            fwd(q, k, v, mask, False, 0.5)
        elif route == "sdpa":
            run(0, q, k, v, mask, True, 0.5)
        elif route == "flash":
            run(flash, q, k, v, mask, False, 0.5)
        elif route == "lse":
            torch.ops.autofa.run_with_lse.default(naive, q, k, v, mask, False, 0.5)
        else:
            with pytest.raises(RuntimeError):
                run(refuses, q, k, v, mask, False, 0.5)

    flash = extension.add_vendor("torch.flash")
    extension.set_miss(lambda key: refuses)
    for _ in range(50):
        call()
    before = _allocated()
    calls = 600 if route in ("refused", "sdpa", "flash") else 1500
    for _ in range(calls):
        call()
    # The smallest leak, a handle or a boxed optional, is a block of 32 bytes per call.
    assert _allocated() - before < calls * 16
