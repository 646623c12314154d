"""torch.compile, torch.export, fake and meta tensors: the operator is traced, never looked up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from dispatch_world import assert_close, inputs, problem, reference
from runtime_variants import require_runtime
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import autofa
from autofa.dispatch import state
from autofa.runtime import extension

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, while it traces
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> None:
    require_runtime()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    state.reload()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return autofa.attention(q, k, v, is_causal=True)


def layouts(q: Tensor) -> dict[str, Tensor]:
    """The same numbers in several memory orders."""
    return {
        "bhnd": q,
        "bnhd": q.transpose(1, 2).contiguous().transpose(1, 2),
        "hbnd": q.transpose(0, 1).contiguous().transpose(0, 1),
        "sliced": torch.cat((q, q), -1)[..., : q.shape[-1]],
        "expanded": q[:1].expand(q.shape),
        "strided head dim": torch.stack((q, q), -1)[..., 0],
    }


SHAPES = ["2,3,5,16", "1,3,5,16", "2,1,5,16", "2,3,1,16", "2,4/2,5/9,16/8"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", list(layouts(torch.ones(1, 1, 1, 1))))
def test_fake_output_has_the_real_strides(shape: str, layout: str) -> None:
    q, k, v = inputs(problem(shape))
    q = layouts(q)[layout]
    gqa = q.shape[1] != k.shape[1]
    real = autofa.attention(q, k, v, enable_gqa=gqa)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (q, k, v)]
        fake = autofa.attention(*fakes, enable_gqa=gqa)
    assert fake.shape == real.shape
    assert fake.dtype == real.dtype
    for size, a, b in zip(real.shape, real.stride(), fake.stride(), strict=True):
        assert size == 1 or a == b, (real.stride(), fake.stride())
    meta = autofa.attention(*(t.to("meta") for t in (q, k, v)), enable_gqa=gqa)
    assert meta.shape == real.shape


@pytest.mark.parametrize("leads", [((2, 1), (1, 3), (2, 3)), ((), (2,), ()), ((2, 1, 3),) * 3])
def test_fake_output_of_other_ranks(leads: tuple[tuple[int, ...], ...]) -> None:
    tensors = [torch.randn(*lead, 5, 8) for lead in leads]
    real = autofa.attention(*tensors)
    with FakeTensorMode() as mode:
        fake = autofa.attention(*(mode.from_tensor(t) for t in tensors))
    assert (fake.shape, fake.stride()) == (real.shape, real.stride())


def test_a_fake_call_with_bad_lengths_fails() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="length"):
        torch.ops.autofa.fwd(torch.empty(1, 3, 8), torch.empty(1, 5, 8), torch.empty(1, 6, 8))


@pytest.mark.parametrize("name", ["fwd", "run"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_opcheck(name: str, layout: str) -> None:
    q, k, v = inputs(problem("2,3,5,16"))
    arguments = (layouts(q)[layout], k, v, None, True, 0.5)
    if name == "run":
        arguments = (0, *arguments)  # type: ignore[assignment]
    torch.library.opcheck(getattr(torch.ops.autofa, name).default, arguments)


def test_compiled_without_a_break_and_without_a_look_up() -> None:
    graphs: list[torch.fx.GraphModule] = []
    table = state.STATE.table
    assert table is not None
    misses = extension.counters()["miss"]

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        assert (extension.counters()["miss"], table.counts.reads) == (misses, 0)
        return graph.forward

    compiled = torch.compile(causal, fullgraph=True, backend=backend)
    q, k, v = inputs(problem("1,2,10,16"))
    assert_close(compiled(q, k, v), reference(q, k, v, is_causal=True))
    assert extension.counters()["miss"] == misses + 1
    called = [node.target for graph in graphs for node in graph.graph.nodes]
    assert torch.ops.autofa.fwd.default in called


def test_dynamic_lengths_do_not_recompile() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(causal, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for n in (10, 11, 12):
        q, k, v = inputs(problem(f"1,2,{n},16"))
        assert_close(compiled(q, k, v), reference(q, k, v, is_causal=True))
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1]


def test_compiled_training_and_options() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return autofa.attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    q, k, v = inputs(problem("1,4/2,10,16"))
    leaf = q.clone().requires_grad_()
    got = compiled(leaf, k, v)
    (mine,) = torch.autograd.grad(got.sum(), leaf)
    want = reference(leaf, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    (theirs,) = torch.autograd.grad(want.sum(), leaf)
    assert_close(got, want)
    assert_close(mine, theirs)
    mask = torch.rand(10, 10) > 0.3
    both = torch.compile(
        lambda *a: autofa.attention(*a, is_causal=True, enable_gqa=True),
        fullgraph=True,
        backend="aot_eager",
    )
    assert_close(both(q, k, v, mask), reference(q, k, v, mask, is_causal=True, enable_gqa=True))


@pytest.mark.slow
def test_inductor() -> None:
    compiled = torch.compile(causal, fullgraph=True)
    for tensor in layouts(inputs(problem("2,3,10,16"))[0]).values():
        _, k, v = inputs(problem("2,3,10,16"))
        assert_close(compiled(tensor, k, v) + 0, reference(tensor, k, v, is_causal=True))


class Model(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return autofa.attention(q, k, v, is_causal=True) * 2


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    q, k, v = inputs(problem("2,3,10,16"))
    n = torch.export.Dim("n", min=2, max=4096)
    program = torch.export.export(
        Model(), (q, k, v), dynamic_shapes=({2: n}, {2: n}, {2: n}), strict=strict
    )
    targets = [node.target for node in program.graph.nodes]
    assert torch.ops.autofa.fwd.default in targets
    for length in (10, 17):
        q, k, v = inputs(problem(f"2,3,{length},16"))
        assert_close(program.module()(q, k, v), 2 * reference(q, k, v, is_causal=True))


def test_forced_kernels_are_for_eager_calls() -> None:
    compiled = torch.compile(causal, fullgraph=True, backend="eager")
    q, k, v = inputs(problem("1,2,10,16"))
    with autofa.force_kernel("torch.unfused"), pytest.raises(Exception, match="forced kernel"):
        compiled(q, k, v)
    broken = torch.compile(causal, backend="eager")
    with autofa.force_kernel("torch.unfused"):
        before = extension.counters()["vendor"]
        assert_close(broken(q, k, v), reference(q, k, v, is_causal=True))
        assert extension.counters()["vendor"] == before + 1
