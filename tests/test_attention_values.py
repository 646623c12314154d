"""Arguments of `attention` that are no matter of kernels: bad ones, and lower-right biases.

What every kernel must compute is in the conformance suite.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from dispatch_world import assert_close, built, flash, inputs, problem, reference, store, tuned
from runtime_variants import require_runtime
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

import autofa
from autofa.dispatch import state
from autofa.errors import AutofaError
from autofa.runtime import extension


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> None:
    require_runtime()


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    state.reload()
    with torch.no_grad():
        yield


def served_by(kernel: str | None):  # type: ignore[no-untyped-def]
    """Forces a kernel; None: whatever attention chooses."""
    if kernel is None:
        return nullcontext()
    if kernel == "cpu.flash":
        built(flash())
        return autofa.force_kernel(flash().slug)
    return autofa.force_kernel(kernel)


@pytest.mark.parametrize("winner", ["cpu.flash", "torch.sdpa"])
def test_lower_right_objects_are_masks(winner: str) -> None:
    # Head dims above 512 have no default for so few rows: untuned, plain SDPA answers.
    shape = problem("1,2,4/9,520", "causal_lower_right")
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
