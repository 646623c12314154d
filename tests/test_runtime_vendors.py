"""torch's own kernels as the runtime calls them, against attention in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from runtime_variants import require_runtime

from autofa.device import cpu_limits
from autofa.kernels import REGISTRY
from autofa.kernels.vendor import VENDORS, VendorKernel
from autofa.runtime import extension, kernels
from autofa.runtime.tensors import problem_of

ON_CPU = [v for v in VENDORS if v.library == "torch" and any(d.device == "cpu" for d in v.domains)]


@pytest.fixture(autouse=True)
def clean_table() -> Iterator[None]:
    require_runtime()
    yield
    extension.set_miss(None)
    extension.table_clear()


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """From the definition; rows that see nothing give 0."""
    groups = q.shape[-3] // k.shape[-3]
    q, k, v = (t.double() for t in (q, k, v))
    k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.double()
    if causal:
        triangle = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~triangle, -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ v


TOLERANCE = {torch.float32: 4e-6, torch.float16: 1e-2, torch.bfloat16: 8e-2}


@pytest.mark.parametrize("vendor", ON_CPU, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_vendors_on_cpu(vendor: VendorKernel, dtype: torch.dtype) -> None:
    """Every mask, grouped heads, both ranks, ragged sizes: what its declaration serves is right."""
    torch.manual_seed(0)
    kernel = kernels.load(vendor, None)
    served = 0
    for heads, n_q, n_k, d, d_v in (
        ((3, 3), 17, 17, 8, 8),
        ((4, 2), 5, 33, 24, 24),
        ((6, 1), 33, 5, 40, 16),
        ((2, 2), 1, 1, 1, 3),
        ((2, 2), 70, 70, 3, 3),
    ):
        q = torch.randn(2, heads[0], n_q, d).to(dtype)
        k = torch.randn(2, heads[1], n_k, d).to(dtype)
        v = torch.randn(2, heads[1], n_k, d_v).to(dtype)
        holes = torch.rand(2, 1, n_q, n_k) > 0.3
        holes[0, 0, n_q // 2] = False
        for mask, causal in (
            (None, False),
            (None, True),
            (holes, False),
            (torch.randn(n_q, n_k).to(dtype), False),
        ):
            problem = problem_of(q, k, v, mask, causal, True)
            if vendor.refusal(problem, cpu_limits()) is not None:
                continue
            for scale in (None, 0.0, -0.7, 0.9):
                out = kernels.run(
                    kernel, q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
                )
                expected = reference(q, k, v, mask, causal, scale)
                assert out.dtype == dtype
                assert (out - expected).abs().max() < TOLERANCE[dtype], (problem, scale)
                if mask is None:
                    flat = [t[0] for t in (q, k, v)]
                    alone = kernels.run(
                        kernel, *flat, is_causal=causal, scale=scale, enable_gqa=True
                    )
                    assert (alone - expected[0]).abs().max() < TOLERANCE[dtype]
                served += 1
    assert served >= 12


def test_masks_with_dims_that_neither_query_nor_key_has() -> None:
    """torch raises there; the operator, and so a compiled call, does not."""
    q, k, v = torch.randn(4, 8), torch.randn(4, 8), torch.randn(2, 4, 8)
    mask = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    out = kernels.run(kernels.SDPA, q, k, v, mask, False, None, False)
    expanded = (q.expand(2, 4, 8), k.expand(2, 4, 8), v)
    expected = torch.nn.functional.scaled_dot_product_attention(*expanded, mask)
    torch.testing.assert_close(out, expected)


def test_a_bucket_cannot_say_that_a_square_is_square() -> None:
    """Exact shapes are checked on every call: the bucket of 63 x 64 is that of 64 x 64."""
    corner_matters = REGISTRY.candidate("torch.flash")
    assert isinstance(corner_matters, VendorKernel)
    unfused = extension.add_vendor("torch.unfused")
    q, k = torch.randn(1, 1, 63, 8), torch.randn(1, 1, 64, 8)
    extension.set_miss(lambda key: unfused)
    before = extension.counters()["fallback"]
    mask = torch.ones(63, 64, dtype=torch.bool).tril(1)
    out = torch.ops.autofa.fwd.default(q, k, k, is_causal=True, lower_right=True)
    assert (out - reference(q, k, k, mask, False, None)).abs().max() < 2e-6
    assert extension.counters()["fallback"] == before + 1


@pytest.mark.parametrize("slug", ["torch.efficient", "torch.cudnn"])
def test_gpu_vendors_refuse_a_cpu(slug: str) -> None:
    q = torch.randn(1, 1, 4, 8)
    kernel = extension.add_vendor(slug)
    with pytest.raises(RuntimeError, match="cuda only"):
        kernels.run(kernel, q, q, q)
    extension.set_miss(lambda key: kernel)
    out = torch.ops.autofa.fwd.default(q, q, q)
    assert (out - reference(q, q, q, None, False, None)).abs().max() < 2e-6


def test_flash_refuses_what_it_would_get_wrong() -> None:
    q, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 16)
    with pytest.raises(RuntimeError, match="head_dim_v"):
        kernels.run(extension.add_vendor("torch.flash"), q, q, v)


@pytest.mark.gpu
def test_vendors_on_cuda() -> None:
    """As on CPU, with head dims that need padding and layouts that need a copy."""
    from autofa.runtime import devices

    torch.manual_seed(0)
    limits = devices.limits("cuda")
    served: dict[str, int] = {}
    for vendor in (v for v in VENDORS if v.library == "torch"):
        kernel = kernels.load(vendor, None)
        for dtype in TOLERANCE:
            for heads, n_q, n_k, d in (
                ((4, 4), 128, 128, 64),
                ((8, 2), 65, 65, 40),
                ((8, 2), 5, 129, 64),
                ((4, 4), 33, 33, 20),
            ):
                for causal in (False, True):
                    q = torch.randn(2, n_q, heads[0], d, device="cuda").to(dtype).transpose(1, 2)
                    k = torch.randn(2, heads[1], n_k, d, device="cuda").to(dtype)
                    problem = problem_of(q, k, k, None, causal, True)
                    if vendor.refusal(problem, limits) is not None:
                        continue
                    out = kernels.run(kernel, q, k, k, is_causal=causal, enable_gqa=True)
                    expected = reference(q.cpu(), k.cpu(), k.cpu(), None, causal, None)
                    tolerance = max(TOLERANCE[dtype], 2e-3)  # TF32 may be on
                    assert out.stride() == torch.empty_like(q).stride()
                    assert (out.cpu() - expected).abs().max() < tolerance, (vendor.slug, problem)
                    served[vendor.slug] = served.get(vendor.slug, 0) + 1
    assert served.keys() == {v.slug for v in VENDORS if v.library == "torch"}


@pytest.mark.gpu
def test_a_captured_graph_is_told_and_replays() -> None:
    kernel = extension.add_vendor("torch.flash")
    asked: list[int] = []

    def callback(key: extension.LaunchKey) -> int:
        asked.append(key.graph)
        return kernel

    extension.set_miss(callback)
    q = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.float16)
    torch.ops.autofa.fwd.default(q, q, q)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.ops.autofa.fwd.default(q, q, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.autofa.fwd.default(q, q, q)
    assert asked == [0, 1]
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, torch.ops.autofa.fwd.default(q, q, q))


@pytest.mark.gpu2
def test_the_device_is_the_tensors_not_the_current_one() -> None:
    asked: list[int] = []
    extension.set_miss(lambda key: asked.append(key.device_index) or 0)
    with torch.cuda.device(0):
        q = torch.randn(1, 2, 16, 64, device="cuda:1", dtype=torch.float16)
        out = torch.ops.autofa.fwd.default(q, q, q)
        assert torch.cuda.current_device() == 0
    assert asked == [1]
    assert out.device == q.device
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(out, expected)
