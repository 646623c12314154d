"""`attention` inside torch: compiled and exported, differentiated twice, deterministic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conformance import (
    Subject,
    attend,
    each_device,
    each_kernel,
    forced,
    fresh,  # noqa: F401
    inputs,
)
from torch import Tensor

import autofa
from autofa.bench.exact import Call, Truth
from autofa.dispatch import state
from autofa.errors import NotApplicableError
from autofa.runtime import extension

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, while it traces
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return autofa.attention(q, k, v, is_causal=True)


class Model(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q, k, v)


@each_device
def test_compiled_and_exported_are_eager(device: str) -> None:
    """No break, nothing looked up while tracing, one graph for all lengths."""
    torch.compiler.reset()
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(causal, fullgraph=True, backend=counter, dynamic=True)
    n = torch.export.Dim("n", min=2, max=4096)
    tensors = inputs(device, (1, 2, 9, 64))
    asked = extension.counters()["miss"]
    program = torch.export.export(Model(), tensors, dynamic_shapes=({2: n}, {2: n}, {2: n}))
    assert extension.counters()["miss"] == asked
    graphs = []
    for length in (10, 11, 12):
        q, k, v = inputs(device, (1, 2, length, 64))
        laid = (q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
        truth = Truth(Call(q, k, v, is_causal=True))
        for out in (compiled(*laid), program.module()(*laid), causal(*laid)):
            assert truth.wrong(out) is None
        graphs.append(counter.frame_count)
    assert graphs[1:] == [graphs[1]] * 2, "a graph for each length"
    torch.compiler.reset()


@each_device
@pytest.mark.parametrize("head_dim", [4, 64])
def test_a_second_derivative_is_right_or_refused(device: str, head_dim: int) -> None:
    """Never missing in silence."""
    for dtype in ("f32", "f64"):
        tensors = inputs(device, (1, 2, 9, head_dim))
        q, k, v = (t.to({"f32": t.dtype, "f64": torch.float64}[dtype]) for t in tensors)

        x = q.clone().requires_grad_()
        (slope,) = torch.autograd.grad(
            autofa.attention(x, k, v).square().sum(), x, create_graph=True
        )
        try:
            slope.square().sum().backward()
        except RuntimeError:
            continue
        exact = q.double().requires_grad_()
        out = (exact @ k.double().mT * head_dim**-0.5).softmax(-1) @ v.double()
        (theirs,) = torch.autograd.grad(out.square().sum(), exact, create_graph=True)
        theirs.square().sum().backward()
        torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-3, atol=1e-4)


@each_device
@pytest.mark.usefixtures("deterministic")
def test_deterministic_gradients_repeat_bit_for_bit(device: str) -> None:
    tensors = [t.requires_grad_() for t in inputs(device, (2, 8, 257, 64))]
    first: tuple[Tensor, ...] = ()
    for run in range(10):
        if run == 5:
            state.reload()  # as after a tune in another process
        found = torch.autograd.grad(causal(*tensors).square().sum(), tensors)
        first = first or found
        assert all(map(torch.equal, first, found))


@each_kernel
@pytest.mark.usefixtures("deterministic")
def test_deterministic_mode_serves_every_deterministic_kernel(kernel: Subject) -> None:
    q, k, v = inputs(kernel.device, (2, 4, 129, 64))
    call = Call(q, k, v, is_causal=True)
    try:
        outs = [forced(kernel, call) for _ in range(5)]
    except NotApplicableError:
        outs = [attend(call) for _ in range(5)]
    assert all(torch.equal(outs[0], out) for out in outs)
