"""Gradients and the log-sum-exp: our forwards with the backwards of torch's backends."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from dispatch_world import built, flash, inputs, no_defaults, problem, store, tuned
from runtime_variants import require_runtime
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

import autofa
from autofa.device import Limits, cpu_limits
from autofa.dispatch import gradients, state
from autofa.errors import UsageError
from autofa.kernels import REGISTRY
from autofa.problem import Problem
from autofa.runtime import backends, block_backward, devices, extension
from autofa.runtime.backends import Call

pytestmark = pytest.mark.filterwarnings(
    "ignore:Lower right causal bias:UserWarning",
    "ignore:Attempting to run cuBLAS:UserWarning",
)

TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
FAMILIES = {
    "cpu": [f.name for f in REGISTRY.families if f.domain.device == "cpu"],
    "cuda": [f.name for f in REGISTRY.families if f.domain.device == "cuda"],
}
ON_EVERY_FAMILY = pytest.mark.parametrize(
    ("device", "family"),
    [
        pytest.param(device, name, id=name, marks=[pytest.mark.gpu] if device == "cuda" else [])
        for device, names in FAMILIES.items()
        for name in names
    ],
)


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> None:
    require_runtime()


@dataclass(frozen=True)
class Case:
    heads: tuple[int, int] = (4, 4)
    lengths: tuple[int, int] = (33, 65)
    mask: str = "none"  # of problem.MASKS, or `both`: bool and causal
    scale: float | None = None
    rank: int = 4
    head_dim: int = 64

    def tensors(self, dtype: str, device: str) -> tuple[list[Tensor], Tensor | None]:
        generator = torch.Generator().manual_seed(1)
        (hq, hk), (nq, nk) = self.heads, self.lengths
        shapes = ((2, hq, nq), (2, hk, nk), (2, hk, nk), (2, hq, nq))
        found = [torch.randn(*s, self.head_dim, generator=generator) for s in shapes]
        if self.rank == 3:
            found = [t[0] for t in found]
        mask = None
        if self.mask in ("bool", "both"):
            mask = torch.rand(nq, nk, generator=generator) > 0.3
            mask[3] = False
        elif self.mask == "additive":
            mask = torch.randn(nq, nk, generator=generator).to(TORCH[dtype])
        mask = None if mask is None else mask.to(device)
        return [t.to(device, TORCH[dtype]) for t in found], mask

    def call(self, mask: Tensor | None) -> dict[str, Any]:
        if self.mask == "causal_lower_right":
            mask = causal_lower_right(*self.lengths)  # type: ignore[no-untyped-call]
        causal = self.mask in ("causal", "both")
        gqa = self.heads[0] != self.heads[1]
        return {
            "attn_mask": mask,
            "is_causal": causal,
            "scale": self.scale,
            "enable_gqa": gqa,
        }

    def scores(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        if self.heads[0] != self.heads[1]:
            k = k.repeat_interleave(self.heads[0] // self.heads[1], -3)
        scores = q @ k.mT * (self.head_dim**-0.5 if self.scale is None else self.scale)
        nq, nk = self.lengths
        sees = torch.ones(nq, nk, dtype=torch.bool, device=q.device)
        if self.mask in ("causal", "both"):
            sees = sees.tril()
        if self.mask == "causal_lower_right":
            sees = sees.tril(nk - nq)
        if mask is not None and mask.dtype == torch.bool:
            sees = sees & mask
        elif mask is not None:
            scores = scores + mask.to(scores.dtype)
        return scores.masked_fill(~sees, -math.inf)

    def truth(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.heads[0] != self.heads[1]:
            v = v.repeat_interleave(self.heads[0] // self.heads[1], -3)
        scores = self.scores(q, k, mask)
        blind = (scores == -math.inf).all(-1, keepdim=True)
        return torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0) @ v

    def problem(self, dtype: str, device: str) -> Problem:
        mask = "bool" if self.mask == "both" else self.mask
        batch = 2 if self.rank == 4 else 1
        return Problem(
            dtype, batch, *self.heads, *self.lengths, self.head_dim, self.head_dim, mask, device
        )


CASES = (
    Case(),
    Case((4, 2), (65, 65), "causal"),
    Case((4, 1), (33, 40), "bool"),
    Case((4, 4), (33, 40), "additive", rank=3),
    Case((4, 4), (9, 9), "causal", -0.5),
    Case((2, 2), (9, 9), "causal", 0.0),
    Case((4, 2), (9, 20), "both", 0.3),
    Case((4, 2), (9, 20), "causal_lower_right"),
    Case((2, 2), (20, 9), "causal_lower_right"),
    Case((2, 2), (1, 70), head_dim=40),
    Case((2, 2), (16, 16), "causal", head_dim=320),
    Case((4, 2), (33, 70), head_dim=320),
)


def limits_on(device: str) -> Limits:
    return cpu_limits(2) if device == "cpu" else devices.limits(torch.device("cuda"))


def with_gradients(function: Any, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def worst(found: list[Tensor], truth: list[Tensor]) -> float:
    return max((a.double() - b).abs().max().item() for a, b in zip(found, truth, strict=True))


def forced(family: str, device: str, case: Case, dtype: str) -> str | None:
    found = REGISTRY.family(family)
    variant = found.default_variant(case.problem(dtype, device), limits_on(device))
    return None if variant is None else variant.slug


@ON_EVERY_FAMILY
@pytest.mark.parametrize("dtype", TORCH)
def test_every_forward_has_the_right_gradients(device: str, family: str, dtype: str) -> None:
    served = 0
    for case in CASES:
        slug = forced(family, device, case, dtype)
        if slug is None:
            continue
        (q, k, v, grad), mask = case.tensors(dtype, device)
        call = case.call(mask)
        doubles = [t.double() for t in (q, k, v)]
        truth = with_gradients(
            lambda q, k, v, m=mask, c=case: c.truth(q, k, v, m), doubles, grad.double()
        )
        same = with_gradients(
            lambda q, k, v, m=mask, c=case: c.truth(q, k, v, m).to(q.dtype), [q, k, v], grad
        )
        before = extension.counters()["own"]
        with autofa.force_kernel(slug):
            found = with_gradients(lambda *t, a=call: autofa.attention(*t, **a), [q, k, v], grad)
        served += 1
        assert extension.counters()["own"] == before + 1
        floor = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}[dtype]
        assert worst(found, truth) <= 3 * worst(same, truth) + floor, (slug, case)
        for one in found:
            assert one.isfinite().all(), (slug, case)
    if not served:
        pytest.skip("serves none of these")


@ON_EVERY_FAMILY
@pytest.mark.parametrize("dtype", TORCH)
def test_every_forward_returns_the_log_sum_exp(device: str, family: str, dtype: str) -> None:
    served = 0
    for case in CASES:
        slug = forced(family, device, case, dtype)
        if slug is None:
            continue
        served += 1
        (q, k, v, _), mask = case.tensors(dtype, device)
        with autofa.force_kernel(slug):
            out, lse = autofa.attention(q, k, v, **case.call(mask), return_lse=True)
            alone = autofa.attention(q, k, v, **case.call(mask))
        assert torch.equal(out, alone), (slug, case)
        check_lse(lse, case, q, k, mask)
    if not served:
        pytest.skip("serves none of these")


def check_lse(lse: Tensor, case: Case, q: Tensor, k: Tensor, mask: Tensor | None) -> None:
    want = case.scores(q.double(), k.double(), mask).logsumexp(-1)
    assert lse.dtype == torch.float32
    assert not lse.requires_grad
    tolerance = 1e-5 if q.dtype in (torch.float32, torch.float64) else 2e-2
    torch.testing.assert_close(lse.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_log_sum_exp_without_a_kernel_of_ours(case: Case, device: str) -> None:
    """By the backend that SDPA picks, or by itself; whatever the table says."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        (q, k, v, grad), mask = case.tensors("f32", device)
        q, k, v, grad = (t.to(dtype) for t in (q, k, v, grad))
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        with no_defaults():
            leaves = [t.requires_grad_() for t in (q, k, v)]
            out, lse = autofa.attention(*leaves, **case.call(mask), return_lse=True)
            check_lse(lse, case, q.detach(), k.detach(), mask)
            out.backward(grad)
        truth = with_gradients(
            lambda *t, m=mask: case.truth(*t, m),
            [t.detach().double() for t in (q, k, v)],
            grad.double(),
        )
        tolerance = 1e-4 if dtype != torch.bfloat16 else 0.1
        assert worst([out.detach(), *(t.grad for t in leaves)], truth) < tolerance


def test_the_log_sum_exp_of_what_nothing_else_serves() -> None:
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(1, 3, 7, 4), torch.randn(3, 7, 6)
    out, lse = autofa.attention(q, k, v, return_lse=True)
    assert out.shape == (2, 3, 5, 6)
    torch.testing.assert_close(lse, (q @ k.mT * 0.5).logsumexp(-1))
    assert autofa.attention(q, k, v[:, :, :0], return_lse=True)[1].shape == (2, 3, 5)
    empty = autofa.attention(q[:, :, :0], k, v, return_lse=True)
    assert (empty[0].shape, empty[1].shape) == ((2, 3, 0, 6), (2, 3, 0))
    none = autofa.attention(q, k[:, :, :0], v[:, :0], return_lse=True)
    assert (none[1] == -math.inf).all()
    assert (none[0] == 0).all()
    with pytest.raises(UsageError, match="dropout"):
        autofa.attention(q, q, q, None, 0.5, return_lse=True)


SHAPE = problem("1,2,33,16")


@pytest.fixture
def wins() -> Any:
    """A world where cpu.flash won the bucket of SHAPE, dense and causal."""
    built(flash())
    store([*tuned(SHAPE), *tuned(problem("1,2,33,16", "causal"))])
    with no_defaults():
        yield
    state.reload()


def own() -> int:
    return extension.counters()["own"]


@pytest.mark.usefixtures("wins")
def test_the_winner_computes_the_forward_of_a_training_step() -> None:
    q, k, v = inputs(SHAPE)
    grad = torch.randn_like(q)
    before = own()
    mine = with_gradients(lambda *t: autofa.attention(*t, is_causal=True), [q, k, v], grad)
    assert own() == before + 1
    theirs = with_gradients(lambda *t: sdpa(*t, is_causal=True), [q, k, v], grad)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    found = autofa.explain(q.requires_grad_(), k, v)
    assert (found.kernel, found.rung) == (flash().slug, "measured")


@pytest.mark.usefixtures("wins")
def test_a_plan_holds_until_the_table_changes() -> None:
    q, k, v = inputs(SHAPE)
    call = Call(q.requires_grad_(), k, v, None, False, None, False, False)
    assert gradients.plan_of(state.STATE.table, call).kernel > 0
    known = dict(gradients._kernels)
    assert len(known) == 1
    state.STATE.table = None  # whatever the table would say now
    try:
        assert gradients.plan_of(None, call).kernel == next(iter(known.values()))
    finally:
        state.reload()
    assert not gradients._kernels


@pytest.mark.usefixtures("wins")
def test_one_odd_call_decides_nothing_for_others() -> None:
    """Strides, switched-off backends and masks that need gradients belong to the call."""
    q, k, v = inputs(SHAPE)
    apart = q.mT.contiguous().mT.requires_grad_()
    autofa.attention(apart, k, v)
    autofa.attention(apart.detach(), k, v, return_lse=True)
    with sdpa_kernel(SDPBackend.MATH):
        autofa.attention(q.clone().requires_grad_(), k, v)
    before = own()
    for _ in range(3):
        autofa.attention(q.clone().requires_grad_(), k, v).sum().backward()
    assert own() == before + 3


@pytest.mark.usefixtures("wins")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_export_of_a_model_with_weights(strict: bool, with_lse: bool) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(16, 16)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return autofa.attention(self.inner(q), k, v, return_lse=with_lse)

    model, call = Model(), inputs(SHAPE)
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(model, call, dynamic_shapes=({2: length},) * 3, strict=strict)
    assert "run_with_lse" not in str(program.graph)
    torch.testing.assert_close(program.module()(*call), model(*call), atol=1e-5, rtol=1e-4)


def test_the_log_sum_exp_in_a_compiled_graph() -> None:
    compiled = torch.compile(
        lambda q, k, v: autofa.attention(q, k, v, is_causal=True, return_lse=True),
        backend="aot_eager",
        fullgraph=True,
    )
    call = inputs(SHAPE)
    for mine, theirs in zip(
        compiled(*call), autofa.attention(*call, is_causal=True, return_lse=True), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_meta_tensors() -> None:
    q = torch.empty(2, 3, 5, 8, device="meta", requires_grad=True)
    assert autofa.attention(q, q, q, is_causal=True).shape == q.shape
    out, lse = autofa.attention(q, q, q, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])


def test_autocast_does_not_reach_into_the_log_sum_exp() -> None:
    q, k, v = (5 * torch.randn(2, 3, 20, 16) for _ in "qkv")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, lse = autofa.attention(q, k, v, return_lse=True)
        _, five = autofa.attention(q[None], k[None], v[None], return_lse=True)
    torch.testing.assert_close(five[0], lse, atol=1e-3, rtol=1e-3)


def test_the_log_sum_exp_under_vmap() -> None:
    q, k, v = (torch.randn(3, 2, 7, 8) for _ in "qkv")
    found = torch.func.vmap(lambda q: autofa.attention(q, k[0], v[0], return_lse=True))(q)
    for i in range(3):
        each = autofa.attention(q[i], k[0], v[0], return_lse=True)
        for a, b in zip(found, each, strict=True):
            torch.testing.assert_close(a[i], b)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_the_log_sum_exp_of_nested_tensors_is_refused() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 4)])
    with pytest.raises(UsageError, match="nested tensor"):
        autofa.attention(nested, nested, nested, return_lse=True)


@pytest.mark.usefixtures("wins")
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_gradients(causal: bool) -> None:
    """A gradient penalty; torch's own kernels cannot be differentiated twice."""

    def penalty(function: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in inputs(SHAPE)]
        found = torch.autograd.grad(
            function(*leaves, is_causal=causal).square().sum(), leaves, create_graph=True
        )
        sum(g.square().sum() for g in found).backward()  # type: ignore[union-attr]
        return [t.grad for t in leaves if t.grad is not None]

    before = own()
    mine = penalty(autofa.attention, torch.float32)
    assert own() == before + 1
    with sdpa_kernel(SDPBackend.MATH):
        truth = penalty(sdpa, torch.float64)
    assert worst(mine, truth) < 1e-4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "additive"])
@pytest.mark.parametrize("scores", [1, 1 << 24])
def test_the_backward_by_blocks(
    device: str, mask: str, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of head dims that differ, in one block and in many."""
    monkeypatch.setattr(block_backward, "_SCORES", scores)
    monkeypatch.setattr(block_backward, "_LEAST_ROWS", 7)
    case = Case((4, 2), (33, 40), mask)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2)):
        (q, k, v, grad), given = case.tensors("f32", device)
        tensors = [t.to(dtype) for t in (q, k, v[..., :24])]
        grad = grad[..., :24].to(dtype)
        with torch.no_grad():
            out, lse = autofa.attention(*tensors, **case.call(given), return_lse=True)
        form = backends.Call(*tensors, given, mask == "causal", None, True, False)
        found = backends.BLOCKS.backward(grad, backends.normalised(form)[0], out, lse)
        doubles = [t.double() for t in tensors]
        truth = with_gradients(
            lambda q, k, v, m=given: case.truth(q, k, v, m), doubles, grad.double()
        )
        assert worst(list(found), truth[1:]) < tolerance * 3
        assert [t.dtype for t in found] == [dtype] * 3


@pytest.mark.usefixtures("wins")
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    q, k, v = inputs(SHAPE)
    grad = torch.randn_like(q)
    plain = with_gradients(autofa.attention, [q, k, v], grad)

    def again(*t: Tensor) -> Any:
        return checkpoint(autofa.attention, *t, use_reentrant=reentrant)

    for a, b in zip(with_gradients(again, [q, k, v], grad), plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("wins")
def test_only_some_need_gradients() -> None:
    for needs in range(1, 8):
        leaves = [t.requires_grad_(bool(needs >> i & 1)) for i, t in enumerate(inputs(SHAPE))]
        autofa.attention(*leaves).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [leaf.requires_grad for leaf in leaves]


@pytest.mark.usefixtures("wins")
def test_what_the_kernel_refuses_torch_serves() -> None:
    """A plan is made for a signature; a head dim that is not dense belongs to the call."""
    q, k, v = inputs(SHAPE)
    autofa.attention(q.requires_grad_(), k, v)
    apart = torch.randn(1, 2, 16, 33).transpose(-1, -2).requires_grad_()
    before = own()
    out = autofa.attention(apart, k, v)
    assert own() == before
    out.sum().backward()
    assert apart.grad is not None


def test_gradients_in_double() -> None:
    generator = random.Random(3)
    for causal in (False, True):
        n = generator.randrange(2, 5)
        leaves = [torch.randn(1, 1, n, 4, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
        assert torch.autograd.gradcheck(
            lambda q, k, v, c=causal: autofa.attention(q, k, v, is_causal=c), leaves
        )


@pytest.mark.usefixtures("wins")
def test_the_memory_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_MOST", 3)
    for n in range(1, 12):
        q = torch.randn(1, 1, n, 8, requires_grad=True)
        autofa.attention(q, q, q)
        assert len(gradients._kernels) <= 3
