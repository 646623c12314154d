"""Every kernel on every layout in memory: strides of each tensor are its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from conformance import (
    ATTENTION,
    Subject,
    check,
    check_gradients,
    dtypes_of,
    each_device,
    each_kernel,
    fresh,  # noqa: F401
    inputs,
    randn,
)
from torch import Tensor

from autofa.bench.exact import Call

pytestmark = pytest.mark.usefixtures("fresh")


def bnhd(tensor: Tensor) -> Tensor:
    """The same values, laid out as (B, N, H, D)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


@each_kernel
@pytest.mark.parametrize("odd", range(8))
def test_each_tensor_may_be_the_one_that_lies_otherwise(kernel: Subject, odd: int) -> None:
    for dtype, causal in itertools.product(dtypes_of(kernel), (False, True)):
        tensors = inputs(kernel.device, (2, 3, 62, 128), dtype=dtype)
        laid = [bnhd(t) if odd >> i & 1 else t for i, t in enumerate(tensors)]
        check(kernel, Call(*laid, is_causal=causal), repeats=1)


VIEWS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "packed": lambda x: [t.transpose(1, 2) for t in x.view(4, 54, 2, 3, 192).unbind(3)],
    "sliced batch": lambda x: [x[1:3], x[1:3], x[2:4]],
    "every other row": lambda x: [x[:, :, ::2], x[:, :, ::2], x[:, :, 1::2]],
    "every other head": lambda x: [x[:, ::2], x[:, ::2], x[:, ::2]],
    "odd offset": lambda x: [x[..., 1:65], x[..., 2:66], x[..., 3:67]],
    "rows of odd length": lambda x: [t[..., :64] for t in x[..., :67].clone().chunk(1)] * 3,
    "strided head dim": lambda x: [x[..., ::2], x[..., ::2], x[..., ::2]],
    "transposed head dim": lambda x: [x[..., :64].mT.contiguous().mT] * 3,
    "batch of stride 0": lambda x: [x[:1].expand_as(x), x, x],
    "heads of stride 0": lambda x: [x, x[:, :1].expand_as(x), x[:, :1].expand_as(x)],
    "one key for all": lambda x: [x, x[:, :, :1].expand_as(x), x],
    "one value for all": lambda x: [x, x, x[:, :, :1].expand_as(x)],
    "overlapping": lambda x: [x.as_strided((2, 3, 20, 64), (300, 90, 7, 1))] * 3,
    "overlapping queries": lambda x: [
        x.as_strided((2, 3, 2, 64), (900, 300, 1, 1)), x[:2, :3], x[:2, :3]
    ],
    "overlapping heads": lambda x: [
        x.as_strided((2, 3, 20, 64), (9000, 5, 64, 1)), x[:2, :3, :20], x[:2, :3, :20]
    ],
    "reversed order": lambda x: [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)] * 3,
    "sizes of 1 with any stride": lambda x: [x.as_strided((1, 3, 1, 64), (7, 128, 3, 1))] * 3,
}  # fmt: skip


@each_kernel
@pytest.mark.parametrize("view", list(VIEWS))
def test_views(kernel: Subject, view: str) -> None:
    for dtype in dtypes_of(kernel):
        q, k, v = VIEWS[view](randn(4, 6, 54, 192, device=kernel.device, dtype=dtype))
        if view in ("overlapping heads", "overlapping queries"):
            q, k, v = q, k[..., :64], v[..., :64]
        check(kernel, Call(q, k, v, is_causal=view == "packed"), repeats=3)


@each_kernel
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_outputs_lie_as_the_query_does(kernel: Subject, order: tuple[int, ...]) -> None:
    back = [order.index(i) for i in range(3)]
    for dtype, width in itertools.product(dtypes_of(kernel), (64, 40)):
        q, k, v = inputs(kernel.device, (2, 3, 9, 64), (2, 3, 21, 64), width, dtype)
        check(kernel, Call(q.permute(*order, 3).contiguous().permute(*back, 3), k, v))


@each_kernel
def test_the_same_bits_twenty_times(kernel: Subject) -> None:
    for dtype, length in itertools.product(dtypes_of(kernel), (50, 333)):
        q, k, v = map(bnhd, inputs(kernel.device, (2, 3, length, 64), dtype=dtype))
        check(kernel, Call(q[:, :, :16], k, v), repeats=20)
        check(kernel, Call(q, k, v, is_causal=True), repeats=20)


@each_device
@pytest.mark.parametrize("view", list(VIEWS))
def test_views_with_gradients(device: str, view: str) -> None:
    q, k, v = VIEWS[view](randn(4, 6, 54, 192, device=device))
    if view in ("overlapping heads", "overlapping queries"):
        q, k, v = q, k[..., :64], v[..., :64]
    check_gradients(Subject(ATTENTION, device), Call(q, k, v))
