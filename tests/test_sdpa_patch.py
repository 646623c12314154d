"""`patch_sdpa`: what it routes, what it leaves alone, and that everything is put back."""

from __future__ import annotations

import inspect
import logging
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import autofa
from autofa.dispatch import shortcut
from autofa.integrations import sdpa_patch

SDPA = torch._C._nn.scaled_dot_product_attention


def held() -> Callable[..., Tensor]:
    return F.scaled_dot_product_attention


class Attend(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    assert held() is SDPA, "the test left another SDPA behind"
    assert len(sdpa_patch._said) == 1
    assert not sdpa_patch._on


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each call that autofa gets."""
    seen: list[int] = []
    attention = sdpa_patch.attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(1)
        return attention(*args, **kwargs)

    monkeypatch.setattr(sdpa_patch, "attention", counted)
    return seen


def qkv(length: int = 33, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, 4, n, 24, generator=generator).requires_grad_(grad) for n in (length, 33, 33)
    )


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# --- on, off, and back ---


def test_a_call_lasts_and_a_block_ends() -> None:
    autofa.patch_sdpa()
    ours = held()
    assert ours is not SDPA
    with autofa.patch_sdpa(False):
        assert held() is SDPA
    assert held() is ours
    autofa.patch_sdpa(False)
    assert held() is SDPA
    with autofa.patch_sdpa() as patch:
        assert held() is ours
        with pytest.raises(RuntimeError, match="open already"), patch:
            pass
    assert held() is SDPA


def test_patched_twice_is_patched_once() -> None:
    for _ in range(50):
        autofa.patch_sdpa()
    autofa.patch_sdpa(False)
    assert held() is SDPA
    with autofa.patch_sdpa():
        with autofa.patch_sdpa():
            pass
        assert held() is not SDPA
    assert held() is SDPA


def test_what_is_said_in_a_block_ends_with_it() -> None:
    with autofa.patch_sdpa():
        autofa.patch_sdpa(False)
        assert held() is SDPA
    assert held() is SDPA
    autofa.patch_sdpa()
    with autofa.patch_sdpa(False):
        autofa.patch_sdpa()
        assert held() is not SDPA
        autofa.patch_sdpa(False)
    assert held() is not SDPA
    autofa.patch_sdpa(False)


def test_a_block_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), autofa.patch_sdpa():
        raise KeyError
    assert held() is SDPA


def test_one_patch_object_serves_again() -> None:
    patch = autofa.patch_sdpa()
    for _ in range(2):
        with patch:
            assert held() is not SDPA
        assert held() is SDPA


def test_blocks_of_threads_may_end_in_any_order() -> None:
    first, second = autofa.patch_sdpa(), autofa.patch_sdpa()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert held() is not SDPA
    second.__exit__()
    autofa.patch_sdpa(False)
    assert held() is SDPA


def test_eight_threads_patch_and_restore(calls: list[int]) -> None:
    q, k, v = qkv()
    want = SDPA(q, k, v)
    wrong: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(40):
                with autofa.patch_sdpa():
                    assert held() is not SDPA
                    close(F.scaled_dot_product_attention(q, k, v), want)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(calls) == 8 * 40


# --- others who patch ---


def theirs(*args: Any, **kwargs: Any) -> Tensor:
    return SDPA(*args, **kwargs)


def test_what_others_put_there_before_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with autofa.patch_sdpa():
        assert held() not in (SDPA, theirs)
        with autofa.patch_sdpa(False):
            assert held() is theirs
    assert held() is theirs
    autofa.patch_sdpa()
    autofa.patch_sdpa()
    autofa.patch_sdpa(False)
    assert held() is theirs
    monkeypatch.undo()


def test_what_others_put_there_meanwhile_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, calls: list[int]
) -> None:
    q, k, v = qkv()
    autofa.patch_sdpa()
    ours = held()

    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        return ours(*args, **kwargs)

    with monkeypatch.context() as others:
        others.setattr(F, "scaled_dot_product_attention", wrapped)
        with caplog.at_level(logging.INFO, "autofa"):
            autofa.patch_sdpa(False)
        assert held() is wrapped
        assert "took the place" in caplog.text
        close(F.scaled_dot_product_attention(q, k, v), SDPA(q, k, v))
        assert not calls, "what was taken while patched is torch's own afterwards"
        with autofa.patch_sdpa():
            F.scaled_dot_product_attention(q, k, v)
            assert len(calls) == 1
        assert held() is wrapped
    F.scaled_dot_product_attention = SDPA


def test_a_patch_in_a_patch_puts_back_what_others_put_between() -> None:
    with autofa.patch_sdpa():
        ours = held()
        F.scaled_dot_product_attention = theirs
        with autofa.patch_sdpa():
            assert held() is ours
        assert held() is theirs
        F.scaled_dot_product_attention = ours
    assert held() is SDPA


def test_autofa_itself_never_calls_what_torch_nn_functional_holds() -> None:
    name = "scaled_dot_product_attention"
    pattern = re.compile(rf"^\s*from torch\.nn\.functional import .*{name}|\b[Ff]\w*\.{name}\(")
    for path in Path(autofa.__file__).parent.rglob("*.py"):
        found = [line for line in path.read_text().splitlines() if pattern.search(line)]
        assert not found, f"{path}: take it from torch._C._nn, which nobody patches"


def test_a_wrapper_that_calls_autofa_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, autofa asks plain SDPA, which must not be the wrapper again."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", autofa.attention)
    q, k, v = qkv()
    assert F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).shape == q.shape
    monkeypatch.undo()


# --- what is routed ---


def test_calls_go_to_autofa(calls: list[int]) -> None:
    q, k, v = qkv()
    with autofa.patch_sdpa():
        got = Attend()(q, k, v)
        with autofa.force_kernel("torch.unfused"):
            Attend()(q, k, v)
    close(got, SDPA(q, k, v, is_causal=True, scale=0.3))
    assert len(calls) == 2
    SDPA(q, k, v)
    F.scaled_dot_product_attention(q, k, v)
    assert len(calls) == 2


def test_a_restriction_of_the_backends_is_honoured(calls: list[int]) -> None:
    q, k, v = qkv()
    with autofa.patch_sdpa():
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                close(F.scaled_dot_product_attention(q, k, v), SDPA(q, k, v))
        assert not calls
        with sdpa_kernel(list(SDPBackend.__members__.values())[1:], set_priority=True):
            F.scaled_dot_product_attention(q, k, v)
        assert len(calls) == 1
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        try:
            F.scaled_dot_product_attention(q, k, v)
        finally:
            torch.backends.cuda.enable_mem_efficient_sdp(True)
        assert len(calls) == 1


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("length", [33, 20])
@pytest.mark.parametrize("how", ["eager", "restricted", "compiled"])
def test_causal_biases(grad: bool, make: Any, length: int, how: str) -> None:
    """torch's bias objects recognise SDPA by the object that torch.nn.functional holds."""
    q, k, v = qkv(length, grad)
    bias = make(length, 33)
    want = SDPA(q, k, v, bias._materialize())

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias)

    with autofa.patch_sdpa():
        if how == "eager":
            got = call(q, k, v)
        elif how == "restricted":
            with sdpa_kernel(SDPBackend.MATH):
                got = call(q, k, v)
        else:
            torch.compiler.reset()
            got = torch.compile(call, fullgraph=True, backend="eager")(q, k, v)
    close(got, want)
    if grad:
        close(*(torch.autograd.grad(out.sum(), q)[0] for out in (got, want)))


@pytest.mark.filterwarnings("ignore:.*prototype:UserWarning")
def test_nested_tensors() -> None:
    parts = [torch.randn(n, 4, 8) for n in (5, 7)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    want = SDPA(nested, nested, nested)
    with autofa.patch_sdpa():
        got = F.scaled_dot_product_attention(nested, nested, nested)
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(nested, nested, nested)
    for ours, theirs in zip(got.unbind(), want.unbind(), strict=True):
        close(ours, theirs)


def test_a_function_mode_sees_torchs_own_function() -> None:
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    q, k, v = qkv()
    with autofa.patch_sdpa(), Mode():
        F.scaled_dot_product_attention(q, k, v)
    assert SDPA in seen


@pytest.mark.parametrize("error", [RuntimeError, autofa.AutofaError, ValueError])
def test_bad_arguments_raise_what_torch_raises_and_what_autofa_does(error: Any) -> None:
    q, k, v = qkv()
    with autofa.patch_sdpa():
        with pytest.raises(error, match="dtype"):
            F.scaled_dot_product_attention(q, k.half(), v.half())
        with pytest.raises(error, match="rank"):
            F.scaled_dot_product_attention(q[0, 0, 0], k, v)
        with pytest.raises(error):
            F.scaled_dot_product_attention(q, k[:, :, :4], v)
    with autofa.patch_sdpa(), pytest.raises(TypeError):
        F.scaled_dot_product_attention(q, k, v, is_causal="yes")


# --- modules of torch ---


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_transformer_layers(training: bool, masked: bool) -> None:
    """With and without their fast path, which stays in C++."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    layer.train(training)
    x = torch.randn(3, 10, 32)
    mask = torch.zeros(3, 10, dtype=torch.bool)
    mask[1, 6:] = masked
    with torch.set_grad_enabled(training):
        want = layer(x, src_key_padding_mask=mask)
        with autofa.patch_sdpa():
            got = layer(x, src_key_padding_mask=mask)
    close(got[~mask], want[~mask])


def test_multihead_attention_is_routed(calls: list[int]) -> None:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(3, 10, 32)
    want = module(x, x, x, need_weights=False)[0]
    with autofa.patch_sdpa():
        got = module(x, x, x, need_weights=False)[0]
    assert len(calls) == 1
    close(got, want)


# --- compilers, tracers, introspection ---


def graph_of(model: torch.nn.Module, *args: Tensor) -> tuple[Tensor, str]:
    code = []

    def backend(graph: torch.fx.GraphModule, example: object) -> Callable[..., Any]:
        code.append(graph.code)
        return graph

    torch.compiler.reset()
    out = torch.compile(model, fullgraph=True, backend=backend)(*args)
    assert len(code) == 1
    return out, code[0]


def test_compile() -> None:
    q, k, v = qkv()
    want = Attend()(q, k, v)
    with torch.no_grad(), autofa.patch_sdpa():
        got, code = graph_of(Attend(), q, k, v)
        assert "autofa.fwd" in code
        assert "_sdp_enabled" not in code
        close(got, want)
        with sdpa_kernel(SDPBackend.MATH):
            got, code = graph_of(Attend(), q, k, v)
        assert "autofa" not in code
        close(got, want)
    with autofa.patch_sdpa():
        got, code = graph_of(Attend(), *qkv(grad=True))
    close(got, want)


def test_a_restriction_inside_a_compiled_function_is_honoured() -> None:
    class Both(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            free = F.scaled_dot_product_attention(q, k, v)
            with sdpa_kernel(SDPBackend.MATH):
                return free, F.scaled_dot_product_attention(q, k, v)

    q, k, v = qkv()
    with torch.no_grad(), autofa.patch_sdpa():
        (free, restricted), code = graph_of(Both(), q, k, v)
    assert code.count("autofa.fwd") == code.count("_nn.scaled_dot_product_attention") == 1
    close(free, SDPA(q, k, v))
    close(restricted, SDPA(q, k, v))


def test_what_is_compiled_follows_the_patch() -> None:
    q, k, v = qkv()
    codes = []

    def backend(graph: torch.fx.GraphModule, example: object) -> Callable[..., Any]:
        codes.append("autofa" in graph.code)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(Attend(), fullgraph=True, backend=backend)
    with torch.no_grad():
        compiled(q, k, v)
        with autofa.patch_sdpa():
            compiled(q, k, v)
        close(compiled(q, k, v), Attend()(q, k, v))
    assert codes[:2] == [False, True]
    assert codes[2:] in ([], [False]), "torch may keep the first graph for its return"


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    q, k, v = qkv()
    with torch.no_grad(), autofa.patch_sdpa():
        program = torch.export.export(Attend(), (q, k, v), strict=strict)
        assert "autofa.fwd" in program.graph_module.code
        got = program.module()(q, k, v)
    close(got, Attend()(q, k, v))


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_torchscript_and_fx(grad: bool) -> None:
    q, k, v = qkv(grad=grad)
    with autofa.patch_sdpa():
        scripted = torch.jit.script(Attend())
        recorded = torch.jit.trace(Attend(), (q, k, v))
        symbolic = torch.fx.symbolic_trace(Attend())
    for length in (33, 20):
        q, k, v = qkv(length, grad)
        for model in (scripted, recorded, symbolic):
            close(model(q, k, v), Attend()(q, k, v))


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_recording_where_sdpa_has_won(grad: bool) -> None:
    """torch.jit.trace makes tensors of sizes: nothing is looked up, and nothing learnt, by them."""
    watched = shortcut.MEMORY.watching
    shortcut.sdpa_won()
    try:
        q, k, v = qkv(grad=grad)
        recorded = torch.jit.trace(autofa.attention, (q, k, v), check_trace=False)
        assert not shortcut.MEMORY.by_query
        q, k, v = qkv(20, grad)
        close(recorded(q, k, v), SDPA(q, k, v))
    finally:
        shortcut.MEMORY.watching = watched


def test_fake_and_meta_tensors() -> None:
    with autofa.patch_sdpa():
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) for x in qkv()]
            assert Attend()(*fakes).shape == fakes[0].shape
        assert Attend()(*(x.to("meta") for x in qkv())).device.type == "meta"


def test_it_looks_like_what_it_stands_for() -> None:
    with autofa.patch_sdpa():
        ours: Any = held()
        assert pickle.loads(pickle.dumps(ours)) is ours
        assert pickle.loads(pickle.dumps(SDPA)) is SDPA
        data = pickle.dumps(ours)
        assert ours.__wrapped__ is SDPA
        assert ours.__doc__ == SDPA.__doc__
        assert f"{ours.__module__}.{ours.__qualname__}" == (
            "torch.nn.functional.scaled_dot_product_attention"
        )
    assert pickle.loads(data) is SDPA
    want = inspect.signature(autofa.attention).parameters
    got = inspect.signature(ours).parameters
    assert [(p.name, p.default, p.kind) for p in got.values()] == [
        (p.name, p.default, p.kind) for p in want.values() if p.name in got
    ]
    assert "enable_gqa" in got
