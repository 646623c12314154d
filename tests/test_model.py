"""`autofa.attention` inside a model: inference on what was tuned, and a training step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import autofa
from autofa.runtime import kernels
from autofa.tuning.api import tune

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 64, 32
WIDTH = HEADS * HEAD_DIM
SHAPE = f"{BATCH},{HEADS},{LENGTH},{HEAD_DIM}"


class Block(nn.Module):
    """One pre-norm transformer block with a causal attention of choice."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, HEAD_DIM)
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = self.attend(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


def model(attend: Callable[..., Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(attend), Block(attend), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11))


def test_inference_uses_what_was_measured_and_equals_sdpa() -> None:
    summary = tune(shapes=[SHAPE], device="cpu", causal=True, trials=1)
    assert summary.exit_code == 0
    autofa.reload()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with torch.no_grad():
        ours, theirs = model(autofa.attention)(x), model(sdpa)(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    q = torch.randn(BATCH, LENGTH, HEADS, HEAD_DIM).transpose(1, 2)
    with torch.no_grad():
        explanation = autofa.explain(q, q, q, is_causal=True)
    assert explanation.rung == "measured"
    assert explanation.kernel == summary.buckets[0].winner


def test_a_training_step_equals_sdpa() -> None:
    torch.manual_seed(1)
    x, target = torch.randn(BATCH, LENGTH, WIDTH), torch.randint(11, (BATCH, LENGTH))
    weights = []
    for attend in (autofa.attention, sdpa):
        network = model(attend)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        loss = nn.functional.cross_entropy(network(x).flatten(0, 1), target.flatten())
        loss.backward()
        optimizer.step()
        weights.append([parameter.detach().clone() for parameter in network.parameters()])
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
def test_a_captured_graph_replays_on_new_inputs() -> None:
    inputs = [torch.randn(1, 8, 1024, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    with torch.no_grad():
        autofa.warmup(tuple(inputs))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = autofa.attention(*inputs)
        for tensor in inputs:
            tensor.normal_()
        graph.replay()
        torch.testing.assert_close(out, sdpa(*inputs), rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
def test_a_graph_of_calls_never_made_before() -> None:
    """torch's own function answers what would have to be loaded while it is captured."""
    sdpa(*[torch.randn(1, 8, 64, 64, device="cuda", dtype=torch.float16) for _ in range(3)])
    inputs = [torch.randn(3, 5, 333, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = autofa.attention(*inputs)
        for tensor in inputs:
            tensor.normal_()
        graph.replay()
        torch.testing.assert_close(out, sdpa(*inputs), rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
def test_a_graph_of_calls_with_masks_that_hide_whole_rows() -> None:
    """What puts SDPA's answer right there waits for nothing on the device."""
    inputs = [torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    mask = torch.rand(2, 1, 128, 128, device="cuda") < 0.7
    mask[:, :, 5] = False
    call = (kernels.SDPA, *inputs, mask, False, None, False)
    with torch.no_grad():
        kernels.run(*call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernels.run(*call)
        graph.replay()
        assert not out[:, :, 5].any()
        expected = sdpa(*[t.float() for t in inputs], mask)
        expected[:, :, 5] = 0
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
