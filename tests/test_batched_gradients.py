"""Many gradients of one attention at once: batched backwards, vectorised Jacobians, torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dispatch_world import built, flash
from runtime_variants import require_runtime
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import autofa
from autofa.errors import NotApplicableError

pytestmark = [
    # torch's own backwards know no batches, so that vmap runs them one by one.
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]

Tensors = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> None:
    require_runtime()
    built(flash())


def tensors(head_dim_v: int) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 9, 16), (2, 2, 11, 16), (2, 2, 11, head_dim_v))
    q, k, v = (torch.randn(*s, generator=generator).requires_grad_() for s in shapes)
    return q, k, v


def by_engine(out: Tensor, inputs: Tensors, grads: Tensor) -> Any:
    return torch.autograd.grad(out, inputs, grads, is_grads_batched=True)


def by_vmap(out: Tensor, inputs: Tensors, grads: Tensor) -> Any:
    return torch.vmap(lambda grad: torch.autograd.grad(out, inputs, grad))(grads)


def bools() -> Tensor:
    mask = torch.rand(9, 11, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[3] = False  # a row that sees no key
    return mask


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": bools()},
    "additive": {"attn_mask": torch.randn(2, 1, 9, 11), "scale": 0.3},
    "negative": {"scale": -0.3},
}


# Head dims that are alike have the backward of torch's flash kernel, others the one by blocks.
@pytest.mark.parametrize("head_dim_v", [16, 24])
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
@pytest.mark.parametrize("way", [by_engine, by_vmap])
def test_a_batch_of_gradients(
    way: Callable[..., Any], options: dict[str, Any], head_dim_v: int
) -> None:
    inputs = tensors(head_dim_v)
    with autofa.force_kernel(flash().slug):
        out: Tensor = autofa.attention(*inputs, **options, enable_gqa=True)
    assert "_Attention" in type(out.grad_fn).__name__
    grads = torch.randn(3, *out.shape)
    each = [torch.autograd.grad(out, inputs, g, retain_graph=True) for g in grads]
    found = way(out, inputs, grads)
    for mine, want in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.stack(want), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head_dim_v", [16, 24])
def test_a_vectorised_jacobian(head_dim_v: int) -> None:
    q, k, v = (t[:1, :2, :3] for t in tensors(head_dim_v))

    def own(*call: Tensor) -> Tensor:
        with autofa.force_kernel(flash().slug):
            return autofa.attention(call[0], call[1], call[2], is_causal=True)

    jacobian: Any = torch.autograd.functional.jacobian
    found = jacobian(own, (q, k, v), vectorize=True)
    wanted = jacobian(lambda q, k, v: sdpa(q, k, v, is_causal=True), (q, k, v))
    for mine, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head_dim_v", [16, 24])
@pytest.mark.parametrize("transform", ["jacrev", "vjp", "vmap of vjp", "vmap of grad"])
def test_transforms_of_functions(transform: str, head_dim_v: int) -> None:
    inputs = tuple(t.detach()[:, :2, :3] for t in tensors(head_dim_v))
    grads = torch.randn(3, 2, 2, 3, head_dim_v)

    def found(attention: Callable[..., Tensor]) -> Any:
        if transform == "jacrev":
            return torch.func.jacrev(attention, argnums=(0, 1, 2))(*inputs)
        if transform == "vmap of grad":
            one = torch.func.grad(lambda *call: attention(*call).square().sum(), argnums=(0, 1, 2))
            return torch.vmap(one)(*inputs)
        pull = torch.func.vjp(attention, *inputs)[1]
        return pull(grads[0]) if transform == "vjp" else torch.vmap(pull)(grads)

    for mine, want in zip(found(autofa.attention), found(sdpa), strict=True):
        torch.testing.assert_close(mine, want)
    # What is forced is not left for plain SDPA in silence.
    with autofa.force_kernel(flash().slug), pytest.raises(NotApplicableError, match="functorch"):
        found(autofa.attention)
