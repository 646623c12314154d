"""Calls that torch itself serves: gradients, dropout, autocast, subclasses, modes, transforms."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from dispatch_world import (
    assert_close,
    built,
    flash,
    inputs,
    no_defaults,
    problem,
    reference,
    store,
    tuned,
)
from runtime_variants import require_runtime
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.overrides import TorchFunctionMode

import autofa
from autofa.dispatch import state
from autofa.errors import NotApplicableError, UsageError
from autofa.runtime import extension

SHAPE = problem("1,2,33,16")


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> None:
    require_runtime()
    built(flash())


@pytest.fixture(autouse=True)
def _tuned() -> Iterator[None]:
    """cpu.flash wins, so that a call that goes to torch goes there for another reason."""
    built(flash())
    store([*tuned(SHAPE), *tuned(problem("1,2,33,16", "causal"))])
    with no_defaults():
        yield
    state.reload()


def own() -> int:
    return extension.counters()["own"]


def test_the_winner_serves_what_needs_no_gradient() -> None:
    q, k, v = inputs(SHAPE)
    before = own()
    autofa.attention(q, k, v)  # grad mode is on, but nothing requires a gradient
    with torch.no_grad():
        autofa.attention(q.requires_grad_(), k, v)
    with torch.inference_mode():
        autofa.attention(q, k, v)
    parameter = torch.nn.Parameter(k, requires_grad=False)
    autofa.attention(q.detach(), parameter, v)
    assert own() == before + 4


@pytest.mark.parametrize("which", range(4))
def test_gradients_are_torchs(which: int) -> None:
    tensors = [*inputs(SHAPE), torch.randn(33, 33)]
    leaf = tensors[which].requires_grad_()
    before = own()
    out = autofa.attention(*tensors)
    (mine,) = torch.autograd.grad(out.sum(), leaf)
    (theirs,) = torch.autograd.grad(reference(*tensors).sum(), leaf)
    assert_close(mine, theirs)
    assert own() == before
    says = autofa.explain(*tensors).reason
    assert ("attn_mask needs gradients" in says) is (which == 3)


def test_a_training_step() -> None:
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 9, 16)

    def step(attention) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
        model.zero_grad()
        q, k, v = (x @ model.in_proj_weight.T).chunk(3, -1)
        heads = [t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v)]
        attention(*heads, is_causal=True).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for mine, theirs in zip(step(autofa.attention), step(sdpa), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_dropout() -> None:
    q, k, v = inputs(SHAPE)
    torch.manual_seed(1)
    got = autofa.attention(q, k, v, None, 0.5)
    torch.manual_seed(1)
    assert torch.equal(got, sdpa(q, k, v, dropout_p=0.5))
    assert autofa.explain(q, k, v, None, 0.5).reason == "dropout"
    with pytest.raises(ValueError, match="length"):
        autofa.attention(q, k, v[:, :, :5], None, 0.5)


def test_autocast() -> None:
    q, k, v = inputs(SHAPE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = autofa.attention(q, k.bfloat16(), v)
        again = autofa.attention(q.bfloat16().requires_grad_(), k, v)
        problem = autofa.explain(q, k.bfloat16(), v).reason
    assert "bf16" in problem
    torch.testing.assert_close(again, got)
    assert got.dtype == torch.bfloat16
    assert_close(got, reference(q, k, v))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        before = own()
        autofa.attention(q, k, v)
    assert own() == before + 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors() -> None:
    rows = [torch.randn(2, n, 8) for n in (3, 5)]
    nested = torch.nested.nested_tensor(
        [t.transpose(0, 1).contiguous() for t in rows], layout=torch.jagged
    ).transpose(1, 2)
    got = autofa.attention(nested, nested, nested).transpose(1, 2)
    for mine, row in zip(got.unbind(), rows, strict=True):
        assert_close(mine.transpose(0, 1), reference(row, row, row))


class Sub(torch.Tensor):
    """A subclass that sees what is called with it."""

    seen: list[object] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("which", range(3))
def test_subclasses_see_sdpa_itself(which: int) -> None:
    tensors = list(inputs(SHAPE))
    tensors[which] = tensors[which].as_subclass(Sub)
    Sub.seen.clear()
    out = autofa.attention(*tensors)
    assert isinstance(out, Sub)
    assert sdpa in Sub.seen
    assert "Sub" in autofa.explain(*tensors).reason


class Mode(TorchFunctionMode):
    seen: list[object] = []  # noqa: RUF012

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_function_modes_see_sdpa_itself() -> None:
    q, k, v = inputs(SHAPE)
    with Mode():
        autofa.attention(q, k, v)
    assert sdpa in Mode.seen


def test_a_default_device_is_no_reason() -> None:
    q, k, v = inputs(SHAPE)
    before = own()
    with torch.device("cpu"):
        autofa.attention(q, k, v)
    assert own() == before + 1


def test_vmap_and_functional_gradients() -> None:
    q, k, v = (torch.randn(3, 2, 7, 8) for _ in range(3))
    got = torch.vmap(lambda a, b, c: autofa.attention(a, b, c, is_causal=True))(q, k, v)
    assert_close(got, reference(q, k, v, is_causal=True))
    mine = torch.func.grad(lambda x: autofa.attention(x, k, v).sum())(q)
    theirs = torch.func.grad(lambda x: reference(x, k, v).sum())(q)
    assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_forward_mode_differentiation_loses_no_tangent() -> None:
    """torch's CPU flash kernel has no forward mode, its math kernel has."""
    q, k, v = (t.double() for t in inputs(SHAPE))
    tangent = torch.randn_like(q)

    def run(function):  # type: ignore[no-untyped-def]
        return torch.func.jvp(lambda x: function(x, k, v), (q,), (tangent,))[1]

    with pytest.raises(NotImplementedError, match="forward AD"):
        run(autofa.attention)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert_close(run(autofa.attention), run(reference))
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(q.float(), tangent.float())
        with pytest.raises(NotImplementedError, match="forward AD"):
            autofa.attention(dual, k.float(), v.float())


def test_other_devices_are_torchs() -> None:
    q, k, v = (t.to("meta") for t in inputs(SHAPE))
    assert autofa.attention(q, k, v).shape == q.shape


def test_deterministic_mode_is_part_of_the_key() -> None:
    q, k, v = inputs(SHAPE)
    misses = extension.counters()["miss"]
    autofa.attention(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        outs = [autofa.attention(q, k, v) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert extension.counters()["miss"] == misses + 2
    assert all(torch.equal(outs[0], out) for out in outs)
    autofa.attention(q, k, v)
    assert extension.flags() == 0


def test_forcing_is_of_its_context_only() -> None:
    q, k, v = inputs(SHAPE)
    seen: list[int] = []

    def other() -> None:
        before = extension.counters()["own"]
        autofa.attention(q, k, v)
        seen.append(extension.counters()["own"] - before)

    with autofa.force_kernel("torch.unfused"):
        vendor = extension.counters()["vendor"]
        autofa.attention(q, k, v)
        assert extension.counters()["vendor"] == vendor + 1
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with autofa.force_kernel(flash().slug):
            assert autofa.explain(q, k, v).kernel == flash().slug
            before = own()
            autofa.attention(q, k, v)
            assert own() == before + 1
    assert seen == [1]
    before = own()
    autofa.attention(q, k, v)
    assert own() == before + 1


def test_forcing_raises_outside_the_domain() -> None:
    q, k, v = inputs(SHAPE)
    with autofa.force_kernel(flash().slug):
        for call in (autofa.attention, autofa.explain):
            for bad in (
                lambda call: call(q.double(), k.double(), v.double()),
                lambda call: call(q, k, v, None, 0.5),
                lambda call: call(q, k, v, torch.zeros(33, 33).requires_grad_()),
                lambda call: call(q.bfloat16(), k.bfloat16(), v.bfloat16()),
            ):
                with pytest.raises(NotApplicableError, match=r"forced kernel .*; supported"):
                    bad(call)
            with pytest.raises(UsageError, match="length"):
                call(q, k, v[:, :, :5])
        found = autofa.explain(q, k, v)
        assert (found.kernel, found.rung) == (flash().slug, "forced")
    with autofa.force_kernel("torch.sdpa"):
        autofa.attention(q.requires_grad_(), k, v).sum().backward()


def test_forcing_an_unknown_kernel_raises_on_entry() -> None:
    for slug in ("cpu.flsh", "cpu.flash-v4-k99q9-b1-f32", ""):
        with pytest.raises(UsageError, match="kernel"), autofa.force_kernel(slug):
            raise AssertionError("entered")
    assert state.STATE.forcing == 0
    assert state.STATE.direct


def test_sdpa_wins_keeps_strides_and_gradients() -> None:
    """The short way for calls that plain SDPA is known to win."""
    shape = problem("2,3,20,16")
    store(tuned(shape, own_ms=2.0))
    q, k, v = inputs(shape)
    layouts = [q, q.transpose(1, 2).contiguous().transpose(1, 2), q.transpose(0, 1).contiguous()]
    layouts[2] = layouts[2].transpose(0, 1)
    for query in layouts:
        outs = [autofa.attention(query, k, v) for _ in range(4)]
        assert {out.stride() for out in outs} == {query.stride()}
        for out in outs:
            assert_close(out, reference(query, k, v))
    counted = extension.counters()
    autofa.attention(q, k, v)
    assert extension.counters() == counted  # the operator was not asked
    q.requires_grad_()
    assert autofa.attention(q, k, v).requires_grad
    assert autofa.attention(q, k, v, dropout_p=1.0).abs().sum() == 0
    with pytest.raises(ValueError, match="length"):
        autofa.attention(q, k, v[:, :, :7])
    with pytest.raises(TypeError, match="dtype"):
        autofa.attention(q, k, v.double())


def test_the_short_way_ends_where_another_kernel_wins() -> None:
    shape = problem("2,3,20,16")
    store(tuned(shape, own_ms=2.0))
    q, k, v = inputs(shape)
    for _ in range(3):
        autofa.attention(q, k, v)
    store(tuned(shape, own_ms=0.5, run="later", provenance=_later()))
    before = own()
    autofa.attention(q, k, v)
    assert own() == before + 1
    # Same query, far more keys: another bucket, of which nothing is known or predicted.
    autofa.attention(q, k.repeat(1, 1, 300, 1), v.repeat(1, 1, 300, 1))
    autofa.attention(q, k, v)
    assert own() == before + 2


def _later():  # type: ignore[no-untyped-def]
    from store_samples import at

    return at(30)


def test_set_precision() -> None:
    with pytest.raises(UsageError, match="precision"):
        autofa.set_precision("f16")
    autofa.set_precision("fast")
    try:
        assert extension.flags() == 2
        before = own()
        autofa.attention(*inputs(SHAPE))
        assert own() == before + 1
    finally:
        autofa.set_precision("f32")
    assert extension.flags() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_goes_on() -> None:
    q, k, v = inputs(SHAPE)
    autofa.attention(q, k, v)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
    try:
        autofa.attention(q, k, v)
        pid = os.fork()
        if pid == 0:
            ok = torch.allclose(autofa.attention(q, k, v), sdpa(q, k, v), atol=1e-5)
            causal = autofa.attention(q, k, v, is_causal=True)  # a miss in the child
            ok = ok and torch.allclose(causal, sdpa(q, k, v, is_causal=True), atol=1e-5)
            os._exit(0 if ok else 1)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        torch.set_num_threads(threads)
