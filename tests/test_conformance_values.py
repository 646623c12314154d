"""Every kernel on every kind of value: scales, large logits, NaN that is seen, dtypes, autocast."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from conformance import (
    ATTENTION,
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
)

import autofa
from autofa.bench.exact import Call, Truth
from autofa.errors import AutofaError, NotApplicableError

pytestmark = pytest.mark.usefixtures("fresh")

SCALES = (0.0, -0.5, 1e-30, 1.0, 50.0)


@each_kernel
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_scales(kernel: Subject, causal: bool, scale: float) -> None:
    for dtype, length in itertools.product(dtypes_of(kernel), (5, 37, 150)):
        tensors = inputs(kernel.device, (1, 2, length, 64), dtype=dtype)
        for _ in range(3 if kernel.name == ATTENTION else 1):  # the third time it is known who wins
            check(kernel, Call(*tensors, is_causal=causal, scale=scale))
        if length == 37:
            check_gradients(kernel, Call(*tensors, is_causal=causal, scale=min(scale, 1.0)))


@each_kernel
def test_a_scale_of_zero_averages_what_is_seen(kernel: Subject) -> None:
    q, k, v = inputs(kernel.device, (1, 2, 20, 64), dtype=dtypes_of(kernel)[0])
    call = Call(q, k, v, is_causal=True, scale=0.0)
    check(kernel, call)
    counts = torch.arange(1, 21, device=v.device)[:, None]
    torch.testing.assert_close(Truth(call).out, v.double().cumsum(2) / counts)


@each_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_a_scale_of_nan_gives_nan(kernel: Subject, causal: bool) -> None:
    for dtype, mask in itertools.product(dtypes_of(kernel), (False, True)):
        tensors = inputs(kernel.device, (1, 2, 37, 64), dtype=dtype)
        seen = torch.ones(37, 37, dtype=torch.bool, device=kernel.device) if mask else None
        call = Call(*tensors, seen, is_causal=causal and not mask, scale=math.nan)
        try:
            out = forced(kernel, call)
        except NotApplicableError:
            out = attend(call)
        assert bool(out.isnan().all())


@each_kernel
@pytest.mark.parametrize("factor", [(30, 30, -0.5), (30, 30, None), (1, 1, 50.0), (30, 1, -3.0)])
def test_large_logits(kernel: Subject, factor: tuple[float, float, float | None]) -> None:
    """A running maximum of unscaled scores is none where the scale is negative."""
    of_q, of_k, scale = factor
    for causal, length in itertools.product((False, True), (12, 129)):
        q, k, v = inputs(kernel.device, (1, 2, length, 64), dtype=dtypes_of(kernel)[0])
        check(kernel, Call(q * of_q, k * of_k, v, is_causal=causal, scale=scale))


@each_kernel
@pytest.mark.parametrize("scale", [None, 0.0, 1e-42, -2.0])
def test_a_nan_that_is_seen_comes_out(kernel: Subject, scale: float | None) -> None:
    for length, place in itertools.product((9, 70), ("query", "key", "value")):
        q, k, v = inputs(kernel.device, (1, 2, length, 64), dtype=dtypes_of(kernel)[0])
        {"query": q, "key": k, "value": v}[place][0, 0, 3] = math.nan
        call = Call(q, k, v, scale=scale)
        if place != "query":
            check(kernel, call)
            continue
        try:
            out = forced(kernel, call)
        except NotApplicableError:
            continue
        assert bool(out[0, 1].isfinite().all())
        assert bool(out[0, 0, [0, 5]].isfinite().all())
        if kernel.family is not None:
            assert bool(out[0, 0, 3].isnan().all())


@each_device
@pytest.mark.parametrize("known", [False, True], ids=["cold", "known"])
@pytest.mark.parametrize("kinds", [("f32", "bf16", "f32"), ("f32", "f32", "f16")], ids=str)
def test_dtypes_that_differ_are_refused(
    device: str, known: bool, kinds: tuple[str, str, str]
) -> None:
    names = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
    q, k, v = (inputs(device, (1, 2, 9, 16), dtype=kind)[0] for kind in kinds)
    if known:
        for _ in range(3):
            autofa.attention(q, q, q)
    parts = zip(("query", "key", "value"), kinds, strict=True)
    text = ", ".join(f"{name} {names[kind]}" for name, kind in parts)
    with pytest.raises(TypeError, match=f"got '{text}'; supported") as caught:
        autofa.attention(q, k, v)
    assert isinstance(caught.value, AutofaError)


@each_device
@pytest.mark.parametrize("grad", [False, True])
def test_autocast_makes_them_one_dtype(device: str, grad: bool) -> None:
    q, k, v = inputs(device, (1, 2, 33, 64))
    with torch.autocast(device, dtype=torch.bfloat16):
        out = autofa.attention(q.requires_grad_(grad), k.bfloat16(), v, is_causal=True)
    assert out.dtype == torch.bfloat16
    rounded = [t.detach().bfloat16() for t in (q, k, v)]
    assert Truth(Call(*rounded, is_causal=True)).wrong(out.detach()) is None


@each_device
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32, torch.float64])
def test_float64_is_exact(device: str, mask: torch.dtype | None) -> None:
    """With a mask in f32 too, of which torch reads the bits as f64."""
    q, k, v = (t.double() for t in inputs(device, (2, 4, 20, 16), (2, 4, 30, 16)))
    bias = None
    if mask is not None:
        bias = inputs(device, (2, 4, 20, 30))[0]
        bias = bias > 0 if mask == torch.bool else bias.to(mask)
    for causal in (False, True):
        call = Call(q, k, v, bias, is_causal=causal)
        check(Subject(ATTENTION, device), call)
        check_gradients(Subject(ATTENTION, device), call)


SHAPES = {
    "lengths": ((1, 1, 3, 8), (1, 1, 5, 8), (1, 1, 6, 8)),
    "far lengths": ((1, 1, 3, 8), (1, 1, 1, 8), (1, 1, 4_000_000, 8)),
    "head dims": ((1, 1, 3, 8), (1, 1, 5, 16), (1, 1, 5, 8)),
    "batch": ((2, 1, 3, 8), (3, 1, 5, 8), (3, 1, 5, 8)),
    "heads": ((1, 8, 3, 8), (1, 2, 5, 8), (1, 2, 5, 8)),
    "rank": ((8,), (8,), (8,)),
}


@each_kernel
@pytest.mark.parametrize("name", list(SHAPES))
def test_shapes_that_do_not_fit_are_refused_before_any_kernel(kernel: Subject, name: str) -> None:
    q, k, v = (torch.zeros(shape, device=kernel.device) for shape in SHAPES[name])
    slug = "" if kernel.family or kernel.name == ATTENTION else kernel.name
    with (
        autofa.force_kernel(slug) if slug else nullcontext(),
        pytest.raises(ValueError, match=r"got .*; supported: .+; .+") as caught,
    ):
        autofa.attention(q, k, v)
    assert isinstance(caught.value, AutofaError)
    if name == "lengths":
        assert "(1, 1, 5, 8)" in str(caught.value)
        assert "(1, 1, 6, 8)" in str(caught.value)


@each_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_log_sum_exp(kernel: Subject, causal: bool) -> None:
    """Natural, f32, -inf on rows that see nothing; from every kernel that gives it."""
    for dtype, (nq, nk) in itertools.product(dtypes_of(kernel), ((6, 10), (70, 33))):
        tensors = inputs(kernel.device, (1, 4, nq, 64), (1, 2, nk, 64), dtype=dtype)
        seen = torch.ones(nq, nk, dtype=torch.bool, device=kernel.device).tril(3)
        seen[[0, 5]] = False
        for mask in (None, seen):
            call = Call(*tensors, mask, is_causal=causal, scale=0.3, enable_gqa=True)
            truth = Truth(call)
            try:
                out, lse = forced(kernel, call, return_lse=True)
            except NotApplicableError:
                out, lse = attend(call, return_lse=True)
            fast = kernel.name == "torch.unfused" and dtype != "f32"
            assert truth.wrong(out, fast=fast) is None
            assert truth.wrong_lse(lse, fast=fast) is None
