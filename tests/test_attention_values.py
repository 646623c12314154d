"""`attention` computes what SDPA computes: shapes, layouts, masks, scales, by every CPU kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from dispatch_world import assert_close, built, flash, inputs, problem, reference, store, tuned
from runtime_variants import require_runtime
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

import autofa
from autofa.dispatch import state
from autofa.errors import AutofaError, NotApplicableError
from autofa.kernels import REGISTRY
from autofa.runtime import devices, extension

KERNELS = (None, "cpu.flash", "torch.sdpa", "torch.flash", "torch.unfused")


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> None:
    require_runtime()


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    state.reload()
    with torch.no_grad():
        yield


def served_by(kernel: str | None, dtype: str = "f32"):  # type: ignore[no-untyped-def]
    """Forces a kernel; None: whatever attention chooses."""
    if kernel is None:
        return nullcontext()
    if kernel == "cpu.flash":
        built(flash(dtype))
        return autofa.force_kernel(flash(dtype).slug)
    return autofa.force_kernel(kernel)


def check(kernel: str | None, q: Tensor, k: Tensor, v: Tensor, *args: object, **kw: object) -> None:
    """Equal to float64, and laid out in the order of the query's dims."""
    dtype = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[q.dtype]
    with served_by(kernel, dtype):
        try:
            got = autofa.attention(q, k, v, *args, **kw)  # type: ignore[arg-type]
        except NotApplicableError:
            assert kernel not in (None, "torch.sdpa")
            pytest.skip(f"{kernel} does not serve this call")
    assert_close(got, reference(q, k, v, *args, **kw))  # type: ignore[arg-type]
    assert got.dtype == q.dtype
    want = torch.empty_like(q[..., :1].expand(got.shape)) if q.dim() == got.dim() else got
    if q.shape[:-2] == got.shape[:-2]:
        order = sorted(range(q.dim() - 1), key=lambda d: -q.stride(d) if q.shape[d] > 1 else 0)
        strides = [got.stride(d) for d in order if got.shape[d] > 1]
        assert strides == sorted(strides, reverse=True), (want.shape, q.stride(), got.stride())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", ["2,3,65,40", "1,2,1/33,64", "1,1,17/5,8", "1,2,62,64/16"])
def test_shapes(kernel: str | None, causal: bool, shape: str) -> None:
    check(kernel, *inputs(problem(shape)), None, is_causal=causal)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_precision(kernel: str | None, dtype: str) -> None:
    check(kernel, *inputs(problem("1,2,33,64", dtype=dtype)), None, is_causal=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("odd", range(8))
def test_layouts_are_independent(kernel: str | None, odd: int) -> None:
    """Any of the three may be a transposed (B, N, H, D) view."""
    tensors = []
    for bit, tensor in enumerate(inputs(problem("2,3,31,32"))):
        transposed = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        tensors.append(transposed if odd >> bit & 1 else tensor)
    check(kernel, *tensors)


def views() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    packed = torch.randn(2, 50, 3, 4, 32).unbind(2)
    big = torch.randn(4, 3, 70, 72)
    flat = torch.randn(4000)
    rows = torch.randn(2, 3, 20, 32)
    return {
        "packed qkv": tuple(t.transpose(1, 2) for t in packed),  # type: ignore[dict-item]
        "sliced batch": (big[1:3], big[1:3], big[2:4]),
        "every other row": (big[:, :, ::2], big[:, :, ::2], big[:, :, 1::2]),
        "every other head": (big[:, ::2], big[:, ::2], big[:, ::2]),
        "odd offset": (big[..., 1:65], big[..., 2:66], big[..., 3:67]),
        "overlapping": tuple(flat.as_strided((2, 3, 20, 16), (300, 90, 7, 1)) for _ in range(3)),  # type: ignore[dict-item]
        "strided head dim": (big[..., ::2], big[..., ::2], big[..., ::2]),
        "expanded": (rows[:1].expand(2, 3, 20, 32), rows[:, :1].expand(2, 3, 20, 32), rows),
    }


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", list(views()))
def test_views(kernel: str | None, name: str) -> None:
    q, k, v = views()[name]
    with served_by(kernel):
        try:
            got = autofa.attention(q, k, v)
            again = [autofa.attention(q, k, v) for _ in range(3)]
        except NotApplicableError:
            pytest.skip(f"{kernel} does not serve this call")
    assert_close(got, reference(q, k, v))
    assert all(torch.equal(got, other) for other in again)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads(kernel: str | None, kv_heads: int) -> None:
    q, k, v = inputs(problem(f"1,8/{kv_heads},19,16"))
    v += torch.arange(kv_heads)[:, None, None] * 10  # a wrong map is then visible
    check(kernel, q, k, v, enable_gqa=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-30, 50.0])
def test_scales(kernel: str | None, causal: bool, scale: float) -> None:
    for _ in range(3):  # the third time it is known who wins
        check(kernel, *inputs(problem("1,2,37,16")), None, is_causal=causal, scale=scale)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_nan_scale_gives_nan(kernel: str | None, grad: bool) -> None:
    if grad and kernel not in (None, "torch.sdpa"):
        pytest.skip(f"{kernel} has no gradients")
    q, k, v = (t.requires_grad_(grad) for t in inputs(problem("1,2,37,16")))
    with torch.set_grad_enabled(grad), served_by(kernel):
        out = autofa.attention(q, k, v, scale=float("nan"))
    assert out.isnan().all()


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales_with_gradients(scale: float) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(problem("1,2,37,16")))
    with torch.enable_grad():
        got = autofa.attention(q, k, v, is_causal=True, scale=scale)
        want = reference(q, k, v, is_causal=True, scale=scale)
        assert_close(got, want)
        mine = torch.autograd.grad(got.sum(), (q, k, v), retain_graph=True)
        theirs = torch.autograd.grad(want.sum(), (q, k, v))
    for a, b in zip(mine, theirs, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("kernel", KERNELS)
def test_three_dims(kernel: str | None) -> None:
    check(kernel, *(t[0] for t in inputs(problem("1,3,21,16"))))


@pytest.mark.parametrize("lead", [(), (2,), (2, 3, 2), (1, 2, 1, 3)])
def test_any_rank(lead: tuple[int, ...]) -> None:
    check(None, *(torch.randn(*lead, 9, 8) for _ in range(3)))


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 3), (1, 3), (2, 3)),
        ((2, 3), (2, 1), (2, 1)),
        ((1, 3), (2, 3), (2, 3)),
        ((2, 3), (3,), ()),
    ],
)
def test_sizes_of_one_broadcast(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    tensors = [torch.randn(*lead, 7, 8) for lead in (q, k, v)]
    check(None, *tensors)


def test_float64_is_exact() -> None:
    q, k, v = (t.double() for t in inputs(problem("1,2,20,16")))
    assert_close(autofa.attention(q, k, v, is_causal=True), reference(q, k, v, is_causal=True))


@pytest.mark.parametrize("empty", [{"b": 0}, {"h": 0}, {"n": 0}, {"d": 0}, {"dv": 0}])
@pytest.mark.parametrize("grad", [False, True])
def test_empty_tensors(empty: dict[str, int], grad: bool) -> None:
    size = {"b": 2, "h": 3, "n": 4, "d": 8, "dv": 8, **empty}
    query = torch.randn(size["b"], size["h"], size["n"], size["d"], requires_grad=grad)
    key = torch.randn(size["b"], size["h"], 5, size["d"], requires_grad=grad)
    value = torch.randn(size["b"], size["h"], 5, size["dv"], requires_grad=grad)
    before = extension.counters()["miss"]
    with torch.set_grad_enabled(grad):
        out = autofa.attention(query, key, value)
        total = out.sum()
    assert out.shape == (size["b"], size["h"], size["n"], size["dv"])
    if grad:
        total.backward()
        assert query.grad is not None
        assert query.grad.shape == query.shape
    if "d" not in empty:
        assert extension.counters()["miss"] == before  # nothing was looked up


def test_no_keys_gives_zeros() -> None:
    out = autofa.attention(
        torch.randn(1, 2, 3, 8), torch.randn(1, 2, 0, 8), torch.randn(1, 2, 0, 8)
    )
    assert torch.equal(out, torch.zeros(1, 2, 3, 8))


MASKS = [(1, 7), (5, 1), (5, 7), (1, 1, 1, 7), (3, 1, 1, 7), (1, 2, 5, 1), (3, 2, 5, 7)]


@pytest.mark.parametrize("size", MASKS)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_masks(size: tuple[int, ...], kind: torch.dtype, causal: bool) -> None:
    q, k, v = inputs(problem("3,2,5/7,8"))
    mask = torch.rand(size) > 0.3 if kind is torch.bool else torch.randn(size)
    check(None, q, k, v, mask, is_causal=causal)


@pytest.mark.parametrize("grad", [False, True])
def test_rows_with_nothing_to_attend_to_are_zero(grad: bool) -> None:
    q, k, v = (t.requires_grad_(grad) for t in inputs(problem("1,2,6/10,8")))
    mask = torch.ones(6, 10, dtype=torch.bool).tril()
    mask[5] = False
    with torch.set_grad_enabled(grad):
        out = autofa.attention(q, k, v, mask)
        total = out.sum()
    assert torch.equal(out[:, :, 5], torch.zeros(1, 2, 8))
    if grad:
        total.backward()
        assert q.grad is not None
        assert q.grad.isfinite().all()


def test_masks_that_are_views() -> None:
    q, k, v = inputs(problem("3,2,5/7,8"))
    for mask in (torch.randn(1, 1, 5, 8)[..., 1:], torch.randn(1, 1, 1, 7).expand(3, 2, 5, 7)):
        check(None, q, k, v, mask)


@pytest.mark.parametrize("lengths", ["2/5", "5/2", "6"])
def test_causal_hangs_on_the_upper_left(lengths: str) -> None:
    for kernel in KERNELS:
        q, k, v = inputs(problem(f"1,1,{lengths},8"))
        with served_by(kernel):
            try:
                out = autofa.attention(q, k, v, is_causal=True)
            except NotApplicableError:
                continue
        assert_close(out[0, 0, 0], v[0, 0, 0].double())
        assert_close(out, reference(q, k, v, is_causal=True))


@pytest.mark.parametrize("winner", ["cpu.flash", "torch.sdpa"])
def test_lower_right_objects_are_masks(winner: str) -> None:
    # Head dims above 256 have no default for so few rows: untuned, plain SDPA answers.
    shape = problem("1,2,4/9,264", "causal_lower_right")
    if winner == "cpu.flash":
        built(flash())
        store(tuned(shape))
    q, k, v = inputs(shape)
    before = extension.counters()["own"]
    out = autofa.attention(q, k, v, causal_lower_right(4, 9))
    visible = torch.ones(4, 9, dtype=torch.bool).tril(5)
    assert_close(out, reference(q, k, v, visible))
    assert (extension.counters()["own"] > before) == (winner == "cpu.flash")
    assert autofa.explain(q, k, v, causal_lower_right(4, 9)).kernel.startswith(winner)


def test_many_rows_and_heads() -> None:
    for shape in ("65536,1,4,8", "1,65536,4,8"):
        q, k, v = inputs(problem(shape))
        assert_close(autofa.attention(q, k, v)[-1, -1], reference(q[-1, -1], k[-1, -1], v[-1, -1]))


def test_legal_flash_variants_agree_with_the_reference() -> None:
    """The slow test has all of them, this one every eighth."""
    _agree(step=8)


@pytest.mark.slow
def test_every_legal_flash_variant_agrees_with_the_reference() -> None:
    _agree(step=1)


def _agree(step: int) -> None:
    limits = devices.limits("cpu")
    shape = problem("1,2,67/131,72", "causal")
    q, k, v = inputs(shape)
    variants = REGISTRY.family("cpu.flash").legal(shape, limits)
    assert variants
    for variant in variants[::step]:
        with autofa.force_kernel(variant.slug):
            out = autofa.attention(q, k, v, is_causal=True)
            again = autofa.attention(q, k, v, is_causal=True)
        assert_close(out, reference(q, k, v, is_causal=True))
        assert torch.equal(out, again), variant.slug


BAD = {
    "dtypes": (
        torch.zeros(1, 1, 3, 8),
        torch.zeros(1, 1, 5, 8).bfloat16(),
        torch.zeros(1, 1, 5, 8),
    ),
    "int": tuple(torch.zeros(1, 1, 3, 8, dtype=torch.int32) for _ in range(3)),
    "complex": tuple(torch.zeros(1, 1, 3, 8, dtype=torch.complex64) for _ in range(3)),
    "lengths": (torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 6, 8)),
    "far lengths": (torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 10**6, 8)),
    "head dims": (torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 5, 16), torch.zeros(1, 1, 5, 8)),
    "batch": (torch.zeros(2, 1, 3, 8), torch.zeros(3, 1, 5, 8), torch.zeros(3, 1, 5, 8)),
    "heads": (torch.zeros(1, 8, 3, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8)),
    "rank": (torch.zeros(8), torch.zeros(8), torch.zeros(8)),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("known", [False, True], ids=["cold", "sdpa-known"])
@pytest.mark.parametrize("name", list(BAD))
def test_bad_input(name: str, known: bool, grad: bool) -> None:
    tensors = [t.clone() for t in BAD[name]]
    if known:  # the same query shape has been answered by plain SDPA before
        for _ in range(3):
            autofa.attention(*inputs(problem("1,1,3/5,8")))
    if grad and tensors[0].is_floating_point():
        tensors[0].requires_grad_()
    expected = TypeError if name in ("dtypes", "int", "complex") else ValueError
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(expected, match=r"got .*; supported") as caught,
    ):
        autofa.attention(*tensors)
    assert isinstance(caught.value, AutofaError)
    if name == "dtypes":
        assert "query float32, key bfloat16, value float32" in str(caught.value)
    if name == "lengths":
        assert "(1, 1, 5, 8)" in str(caught.value)
        assert "(1, 1, 6, 8)" in str(caught.value)
    with torch.set_grad_enabled(grad), pytest.raises(expected):
        autofa.explain(*tensors)


@pytest.mark.parametrize(
    "mask", [torch.ones(7), torch.ones(3, 5, 7), torch.ones(4, 7), torch.ones(1)]
)
def test_bad_mask_shapes(mask: Tensor) -> None:
    with pytest.raises(ValueError, match="attn_mask"):
        autofa.attention(*inputs(problem("3,2,5/7,8")), mask)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float64, torch.complex64])
def test_bad_mask_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="attn_mask dtype"):
        autofa.attention(*inputs(problem("1,2,5,8")), torch.ones(5, 5).to(dtype))


def test_not_tensors_raise_what_torch_raises() -> None:
    with pytest.raises(TypeError):
        autofa.attention(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        autofa.attention([1.0], [1.0], [1.0])  # type: ignore[arg-type]


def test_arguments_as_torch_takes_them() -> None:
    """A 0-dim tensor as scale, an integer one: whatever torch accepts is served."""
    q, k, v = inputs(problem("1,2,5,8"))
    for scale in (1, torch.tensor(0.5)):
        got = autofa.attention(q, k, v, scale=scale)  # type: ignore[arg-type]
        assert_close(got, sdpa(q, k, v, scale=scale).double())  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("kernel", [None, "cpu.flash", "torch.sdpa"])
@pytest.mark.parametrize("sizes", [(5, 9), (9, 5), (7, 7)])
@pytest.mark.parametrize("grad", [False, True])
def test_lower_right_with_is_causal_means_both(
    kernel: str | None, sizes: tuple[int, int], grad: bool
) -> None:
    if grad and kernel == "cpu.flash":
        pytest.skip("a forced own kernel gives no gradients")
    rows, columns = sizes
    q = torch.randn(1, 2, rows, 8, requires_grad=grad)
    k, v = torch.randn(2, 1, 2, columns, 8).unbind()
    visible = torch.ones(rows, columns, dtype=torch.bool).tril().tril(columns - rows)
    with torch.set_grad_enabled(grad), served_by(kernel):
        out = autofa.attention(q, k, v, causal_lower_right(rows, columns), is_causal=True)
    assert_close(out.detach(), reference(q.detach(), k, v, visible))


@pytest.mark.parametrize("place", ["query", "key", "value", "attn_mask"])
def test_one_meta_tensor_among_others_is_an_error(place: str) -> None:
    tensors = {name: torch.randn(1, 2, 9, 16) for name in ("query", "key", "value")}
    if place == "attn_mask":
        tensors[place] = torch.ones(9, 9, dtype=torch.bool)
    tensors[place] = tensors[place].to("meta")
    with pytest.raises(AutofaError, match="device"):
        autofa.attention(**tensors)
