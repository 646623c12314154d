"""The attention libraries that are installed, on a GPU, against float64. Needs torch and pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from runtime_variants import require_runtime
from torch import Tensor

from autofa.kernels import REGISTRY
from autofa.kernels.vendor import VENDORS, VendorKernel
from autofa.runtime import extension, kernels
from autofa.runtime.tensors import problem_of

# What compilers of these libraries warn of is theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

INSTALLED = tuple(v for v in REGISTRY.vendors if v not in VENDORS and v.version() is not None)
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Hq, Hkv, Nq, Nk: squares and not, ragged, grouped, decoding, and lengths of ffpa-attn.
SHAPES = (
    (4, 4, 128, 128),
    (8, 2, 65, 65),
    (6, 2, 1, 600),
    (4, 1, 5, 129),
    (2, 2, 640, 640),
    (4, 2, 513, 777),
    (2, 2, 9, 5),
)
HEAD_DIMS = (64, 128, 256, 20, 320, 512, 1024)


@pytest.fixture(autouse=True)
def _runtime() -> Iterator[None]:
    require_runtime()
    with torch.no_grad():
        yield
    extension.set_miss(None)
    extension.table_clear()


def reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp from the definition; causal hangs on the lower-right corner."""
    groups = q.shape[1] // k.shape[1]
    query, key, value = (t.double() for t in (q, k, v))
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        rows, keys = scores.shape[-2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(1 + keys - rows)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0) @ value, lse


def tensors(
    heads: tuple[int, int], lengths: tuple[int, int], width: int, dtype: torch.dtype, order: str
) -> tuple[Tensor, Tensor, Tensor]:
    def make(count: int, length: int) -> Tensor:
        if order == "bnhd":
            made = torch.randn(2, length, count, width, device="cuda").transpose(1, 2)
        else:
            made = torch.randn(2, count, length, width, device="cuda")
        return made.to(dtype)

    return make(heads[0], lengths[0]), make(heads[1], lengths[1]), make(heads[1], lengths[1])


def served(vendor: VendorKernel, tensors: tuple[Tensor, Tensor, Tensor], causal: bool) -> bool:
    from autofa.runtime import devices

    square = tensors[0].shape[-2] == tensors[1].shape[-2]
    problem = problem_of(*tensors, None, causal, True, lower_right=causal and not square)
    return vendor.refusal(problem, devices.limits("cuda")) is None


@pytest.mark.parametrize("vendor", INSTALLED, ids=str)
def test_installed_libraries_are_right(vendor: VendorKernel) -> None:
    """Every shape, head dim, corner, scale and order in memory that it declares; with the LSE."""
    torch.manual_seed(0)
    kernel = kernels.load(vendor, None)
    count = 0
    for dtype in TOLERANCE:
        for width in HEAD_DIMS:
            for index, (heads_q, heads_kv, rows, keys) in enumerate(SHAPES):
                order = ("bhnd", "bnhd")[index % 2]
                scale = (None, 0.3, -0.05)[index % 3]
                q, k, v = tensors((heads_q, heads_kv), (rows, keys), width, dtype, order)
                for causal in (False, True):
                    if not served(vendor, (q, k, v), causal):
                        continue
                    corner = causal and rows != keys
                    arguments = (kernel, q, k, v, None, causal, scale, True, corner)
                    out = torch.ops.autofa.run.default(*arguments)
                    again, lse = torch.ops.autofa.run_with_lse.default(*arguments)
                    expected, logs = reference(q, k, v, causal, scale)
                    what = (vendor.slug, dtype, width, heads_q, rows, keys, causal, order)
                    assert out.stride() == torch.empty_like(q).stride(), what
                    error = (out.double() - expected).abs().max()
                    assert error < TOLERANCE[dtype], (what, error)
                    assert torch.equal(out, again), what
                    finite = logs.isfinite()
                    assert torch.equal(lse.isfinite(), finite), what
                    assert (lse[~finite] == float("-inf")).all(), what
                    error = (lse[finite].double() - logs[finite]).abs().max()
                    assert error < 1e-2, (what, error)
                    count += 1
    print(f"{vendor.slug} {vendor.version()}: {count} calls right")
    assert count >= 10


@pytest.mark.parametrize("vendor", INSTALLED, ids=str)
def test_captured_graphs_replay(vendor: VendorKernel) -> None:
    """One that is cold inside the capture is served, if by SDPA; a warm one by the library."""
    kernel = kernels.load(vendor, None)
    width = next(d for d in (64, 320, 512) if d in vendor.domains[0].head_dims)
    for length in (520, 648):
        q, k, v = tensors((2, 2), (length, length), width, torch.bfloat16, "bhnd")
        extension.set_miss(lambda key: kernel)
        for warm in (False, True):
            before = extension.counters()
            if warm:
                torch.ops.autofa.fwd.default(q, k, v)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.nn.functional.scaled_dot_product_attention(q, k, v)  # cuDNN's own warm-up
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = torch.ops.autofa.fwd.default(q, k, v)
            q.copy_(torch.randn_like(q))
            graph.replay()
            torch.cuda.synchronize()
            expected, _ = reference(q, k, v, False, None)
            assert (out.double() - expected).abs().max() < TOLERANCE[torch.bfloat16]
            if warm:
                assert extension.counters()["fallback"] == before["fallback"]


@pytest.mark.parametrize("vendor", INSTALLED, ids=str)
def test_another_stream_and_thread(vendor: VendorKernel) -> None:
    """It runs on the current stream of the calling thread."""
    kernel = kernels.load(vendor, None)
    width = next(d for d in (64, 320, 512) if d in vendor.domains[0].head_dims)
    q, k, v = tensors((2, 2), (1024, 1024), width, torch.bfloat16, "bnhd")
    expected, _ = reference(q, k, v, False, None)
    kernels.run(kernel, q, k, v)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(5):
        late = torch.full_like(q, float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            late.copy_(q)
            out = kernels.run(kernel, late, k, v)
        side.synchronize()
        assert (out.double() - expected).abs().max() < TOLERANCE[torch.bfloat16]
