"""Every kernel with every mask: what is hidden adds nothing, NaN included, and empty rows are 0."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conformance import (
    ATTENTION,
    TORCH,
    Subject,
    attend,
    check,
    check_gradients,
    dtypes_of,
    each_device,
    each_kernel,
    forced,
    fresh,  # noqa: F401
    inputs,
    randn,
)
from torch import Tensor

import autofa
from autofa.bench.exact import Call, Truth

pytestmark = pytest.mark.usefixtures("fresh")

KINDS = ("bool", "f32", "own")


def as_mask(seen: Tensor, kind: str, dtype: str) -> Tensor:
    """A mask that lets these keys be seen: bool, or additive in f32 or the query's dtype."""
    if kind == "bool":
        return seen
    values = TORCH["f32" if kind == "f32" else dtype]
    bias = randn(*seen.shape, device=str(seen.device)).to(values)
    return bias.masked_fill(~seen, -math.inf)


@each_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_see_nothing_are_zero(kernel: Subject, kind: str) -> None:
    for dtype, (nq, nk) in itertools.product(dtypes_of(kernel), ((6, 10), (40, 70))):
        tensors = inputs(kernel.device, (1, 2, nq, 64), (1, 2, nk, 64), dtype=dtype)
        seen = torch.ones(nq, nk, dtype=torch.bool, device=kernel.device).tril()
        seen[[0, 5]] = False
        call = Call(*tensors, as_mask(seen, kind, dtype))
        check(kernel, call)
        assert bool((Truth(call).out[:, :, [0, 5]] == 0).all())
        check_gradients(kernel, call)


@each_kernel
@pytest.mark.parametrize("lower_right", [False, True])
def test_causal_rows_that_see_nothing_are_zero(kernel: Subject, lower_right: bool) -> None:
    for nq, nk in ((9, 4), (150, 40), (33, 1)):
        for dtype in dtypes_of(kernel):
            tensors = inputs(kernel.device, (1, 2, nq, 64), (1, 2, nk, 64), dtype=dtype)
            check(kernel, Call(*tensors, is_causal=True, lower_right=lower_right))


@each_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [127, 128, 129, 640, 1025])
def test_whole_tiles_are_hidden_before_the_first_key_seen(
    kernel: Subject, kind: str, length: int
) -> None:
    """A window of ten keys; a running maximum that starts at -inf meets tiles of -inf alone."""
    rows = torch.arange(length, device=kernel.device)
    where = rows[:, None] - rows
    dtype = dtypes_of(kernel)[-1]
    tensors = inputs(kernel.device, (1, 1, length, 4 if length == 640 else 64), dtype=dtype)
    check(kernel, Call(*tensors, as_mask((where >= 0) & (where <= 10), kind, dtype)))


@each_kernel
@pytest.mark.parametrize("length", [1, 31, 33, 38, 39, 70, 127])
@pytest.mark.parametrize("causal", [False, True])
def test_memory_past_the_tail_is_not_read(kernel: Subject, length: int, causal: bool) -> None:
    for head_dim, dtype in zip((8, 40, 64), itertools.cycle(dtypes_of(kernel)), strict=False):
        wide = torch.full((3, 2, 2, 160, head_dim), math.nan, dtype=TORCH[dtype])
        wide = wide.to(kernel.device)
        q, k, v = (wide[i, :, :, :length] for i in range(3))
        for i, values in enumerate(inputs(kernel.device, (2, 2, length, head_dim))):
            (q, k, v)[i].copy_(values)
        check(kernel, Call(q, k, v, is_causal=causal), repeats=3)


@each_kernel
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", ["causal", "lower right", *KINDS])
def test_what_is_hidden_does_not_come_out(kernel: Subject, poison: float, mask: str) -> None:
    """Keys and values that no query sees lie among those that are seen, in the same tiles."""
    for nq, nk, first in ((33, 64, 33), (4, 40, 4), (1, 40, 1)):
        for dtype, also_keys in itertools.product(dtypes_of(kernel), (False, True)):
            q, k, v = inputs(kernel.device, (1, 2, nq, 64), (1, 2, nk, 64), dtype=dtype)
            for tensor in (k, v)[not also_keys :]:
                tensor[:, :, first:] = poison
            seen = torch.ones(nq, nk, dtype=torch.bool, device=kernel.device)
            seen[:, first:] = False
            if mask == "causal":
                call = Call(q, k, v, is_causal=True)
            elif mask == "lower right":
                call = Call(q, k, v, is_causal=True, lower_right=True)
            else:
                call = Call(q, k, v, as_mask(seen, mask, dtype))
            check(kernel, call)


@each_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_an_explicit_and_a_causal_mask_mean_both(kernel: Subject, kind: str) -> None:
    for dtype, (nq, nk) in itertools.product(dtypes_of(kernel), ((4, 4), (33, 70), (70, 33))):
        tensors = inputs(kernel.device, (2, 2, nq, 64), (2, 2, nk, 64), dtype=dtype)
        seen = randn(nq, nk, device=kernel.device) > 0
        seen.diagonal().fill_(True)
        call = Call(*tensors, as_mask(seen, kind, dtype), is_causal=True)
        check(kernel, call)
        check_gradients(kernel, call)


@each_kernel
def test_true_means_attend(kernel: Subject) -> None:
    for dtype in dtypes_of(kernel):
        tensors = inputs(kernel.device, (1, 2, 8, 64), dtype=dtype)
        lower = torch.ones(8, 8, dtype=torch.bool, device=kernel.device).tril()
        check(kernel, Call(*tensors, lower))
        check(kernel, Call(*tensors, ~lower))
        causal = Truth(Call(*tensors, is_causal=True))
        assert causal.wrong(attend(Call(*tensors, lower))) is None
        assert causal.wrong(attend(Call(*tensors, ~lower))) is not None


def _shapes(nk: int) -> list[tuple[int, ...]]:
    full = (3, 2, 5, nk)
    kept = itertools.product(*((size, 1) for size in full))
    return [*kept, (5, nk), (1, nk), (5, 1), (2, 5, nk)]


@each_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nk", [7, 43])
def test_masks_of_every_broadcast_shape(kernel: Subject, kind: str, nk: int) -> None:
    dtype = dtypes_of(kernel)[nk % len(dtypes_of(kernel))]
    tensors = inputs(kernel.device, (3, 2, 5, 64), (3, 2, nk, 64), dtype=dtype)
    for shape in _shapes(nk):
        seen = randn(*shape, device=kernel.device) > -0.5
        check(kernel, Call(*tensors, as_mask(seen, kind, dtype)))


@each_kernel
@pytest.mark.parametrize("nk", [7, 77, 133])
def test_masks_that_are_views(kernel: Subject, nk: int) -> None:
    dtype = dtypes_of(kernel)[-1]
    tensors = inputs(kernel.device, (3, 2, 5, 64), (3, 2, nk, 64), dtype=dtype)
    wide = randn(3, 2, 9, nk + 6, device=kernel.device)
    for kind in KINDS:
        mask = as_mask(wide > -0.5, kind, dtype)
        views = (
            mask[:1, :1, :5, 1 : nk + 1],  # an odd byte offset
            mask[:1, :1, :1, 3 : nk + 3].expand(3, 2, 5, nk),
            mask[:, :, ::2, 2 : nk + 2],
            mask[:, :, :5, :nk].transpose(0, 1).contiguous().transpose(0, 1),
            mask[:, :, :5, :nk].mT.contiguous().mT,
            mask[0, 0, :5, :nk].expand(3, 2, 5, nk),
        )
        for view in views:
            check(kernel, Call(*tensors, view))


@each_kernel
@pytest.mark.parametrize("kind", ["f32", "own"])
def test_the_lowest_finite_bias_hides_nothing_by_itself(kernel: Subject, kind: str) -> None:
    """What many models write for "hidden": a row that has nothing else is averaged, as in torch."""
    for dtype in dtypes_of(kernel):
        tensors = inputs(kernel.device, (1, 2, 20, 64), (1, 2, 50, 64), dtype=dtype)
        bias = torch.zeros(20, 50, dtype=TORCH["f32" if kind == "f32" else dtype])
        lowest = torch.finfo(bias.dtype).min
        bias[1:] = lowest
        bias[2:, 7] = 0.0
        call = Call(*tensors, bias.to(kernel.device))
        if bias.dtype == torch.float16:
            bias.masked_fill_(bias == lowest, -1e4)  # in f16 the lowest is no more than large
            call = Call(*tensors, bias.to(kernel.device))
        check(kernel, call)


@each_device
@pytest.mark.parametrize("shape", [(7,), (3, 5, 7), (4, 7), (5, 8), (1, 3, 2, 5, 7)], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_masks_that_do_not_fit_are_refused(device: str, shape: tuple[int, ...], grad: bool) -> None:
    q, k, v = inputs(device, (3, 2, 5, 8), (3, 2, 7, 8))
    with pytest.raises(ValueError, match="attn_mask"):
        autofa.attention(q.requires_grad_(grad), k, v, torch.ones(shape, device=device))


@each_device
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float64, torch.complex64])
def test_masks_of_other_dtypes_are_refused(device: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"attn_mask dtype: got .*; supported: bool, float32"):
        autofa.attention(*inputs(device, (1, 2, 5, 8)), torch.ones(5, 5, device=device).to(dtype))


@each_kernel
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_an_expanded_mask_is_not_copied_in_full(kernel: Subject) -> None:
    """By our own kernels; those of other libraries may."""
    if kernel.family is None:
        pytest.skip("of another library, or whichever wins")
    rows, keys, heads = (16 if kernel.name == "cpu.decode" else 256), 512, 8
    dtype = dtypes_of(kernel)[0]
    q, k, v = inputs(kernel.device, (1, heads, rows, 64), (1, heads, keys, 64), dtype=dtype)
    narrow = randn(1, 1, 1, keys, device=kernel.device) > -0.5
    for mask in (narrow, as_mask(narrow, "own", dtype)):
        call = Call(q, k, v, mask.expand(1, heads, rows, keys))
        if not check(kernel, call):
            continue
        activity = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
            forced(kernel, call)
        kind = "self_device_memory_usage" if kernel.device == "cuda" else "self_cpu_memory_usage"
        largest = max(getattr(event, kind) for event in profile.events())
        assert 0 < largest < heads * rows * keys


@each_device
def test_as_many_heads_in_the_mask_as_the_query_has(device: str) -> None:
    """A mask over dims that only the value has is served, where torch raises."""
    q, k, v = randn(4, 9, 8, device=device), randn(1, 4, 9, 8, device=device), randn(3, 4, 9, 8)
    for shape in ((3, 1, 1, 9), (3, 4, 9, 9), (4, 1, 9)):
        call = Call(q, k, v.to(device), randn(*shape, device=device) > 0)
        check(Subject(ATTENTION, device), call)
        check_gradients(Subject(ATTENTION, device), call)
