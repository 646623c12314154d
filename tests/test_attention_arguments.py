"""Arguments of every kind: attention refuses what torch's own function refuses, in our words."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as sdpa

import autofa
from autofa.dispatch.shortcut import MEMORY
from autofa.dispatch.shortcut import sdpa_won as watch

Q = torch.randn(1, 2, 9, 16)


class Truthy:
    def __bool__(self) -> bool:
        return True

    def __float__(self) -> float:
        return 0.5


VALUES = (
    None, 0, 1, 0.5, 0.0, True, False, "x", "", [], [1], [[True]], 1j, 10**400, -0.1, math.nan,
    math.inf, np.bool_(True), np.float32(0.5), np.int64(1), np.ones((9, 9), bool),
    np.array(0.5), torch.tensor([0.5]), torch.tensor(True), torch.tensor(0.5), torch.tensor(1),
    Truthy(), object,
)  # fmt: skip
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
# Torch serves these by a route of its own choice that some builds of it lack.
UNSURE = {("dropout_p", "-0.1"), ("dropout_p", "nan"), ("dropout_p", "inf")}


@pytest.fixture(params=["looked up", "known"], autouse=True)
def route(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether plain SDPA is known to win the call."""
    autofa.reload()
    MEMORY.watching = False
    if request.param == "known":
        watch()
        usual = (Q.shape, Q.shape, Q.dtype, Q.get_device(), torch.get_num_threads())
        MEMORY.by_query[Q.shape] = {
            (*usual, causal, gqa, None): True for causal in (False, True) for gqa in (False, True)
        }
    yield
    autofa.reload()


@pytest.mark.parametrize("name", NAMES)
def test_what_torch_refuses_is_refused_and_the_rest_is_not(name: str) -> None:
    for value in VALUES:
        call = {"query": Q, "key": Q, "value": Q, name: value}
        try:
            wanted = sdpa(**call)
        except Exception:
            wanted = None
        if wanted is None or (name, str(value)) in UNSURE:
            with pytest.raises(
                (ValueError, TypeError), match=r"got .*; supported: .+; .+"
            ) as found:
                autofa.attention(**call)
            assert isinstance(found.value, autofa.AutofaError), value
            assert str(found.value).startswith(
                name if not isinstance(value, torch.Tensor) else ""
            ), value
        else:
            got = autofa.attention(**call)
            # Of a scale that is no finite number, autofa makes NaN, torch sometimes zeros.
            odd_scale = name == "scale" and value is not None and not math.isfinite(value)
            if odd_scale or (name == "dropout_p" and float(value)):
                assert got.shape == wanted.shape
            else:
                torch.testing.assert_close(got, wanted, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_dims_too_few_and_too_many() -> None:
    flat = Q[0, 0]
    with pytest.raises(ValueError, match=r"enable_gqa: got .*supported: tensors with heads"):
        autofa.attention(flat, flat, flat, enable_gqa=True)
    with pytest.raises(ValueError, match=r"attn_mask: got .*supported: what broadcasts"):
        autofa.attention(Q, Q, Q, torch.zeros(1, 1, 1, 9, 9))


@pytest.mark.parametrize("call", [autofa.explain, lambda *a: autofa.warmup(tuple(a))])
@pytest.mark.parametrize("bad", [None, [[1.0]], np.ones((9, 16))])
def test_those_that_only_ask_refuse_it_too(call: object, bad: object) -> None:
    with pytest.raises(autofa.AutofaError, match=r"torch\.Tensor"):
        call(Q, bad, Q)  # type: ignore[operator]


def test_a_forced_kernel_is_not_blamed_for_a_wrong_argument() -> None:
    with autofa.force_kernel("torch.flash"), pytest.raises(TypeError, match="attn_mask: got 'int'"):
        autofa.attention(Q, Q, Q, 5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_nested_tensors_of_the_strided_layout_are_torchs(grad: bool) -> None:
    parts = [torch.randn(2, n, 8) for n in (3, 4)]
    nested = torch.nested.nested_tensor(parts, requires_grad=grad)
    got = autofa.attention(nested, nested, nested)
    for one, part in zip(got.unbind(), parts, strict=True):
        torch.testing.assert_close(one, sdpa(part, part, part))
    assert "nested" in autofa.explain(nested, nested, nested).reason
    if grad:
        got.to_padded_tensor(0.0).sum().backward()
        assert nested.grad is not None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_torch_says_of_its_own_bias_stands(device: str) -> None:
    query = torch.empty(1, 2, 5, 8, device=device)
    with pytest.raises(ValueError, match="CausalBias should not be used"):
        autofa.attention(query, query, query, causal_upper_left(5, 5), is_causal=True)
