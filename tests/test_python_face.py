"""The usual calls of `attention` as one C function: who is served there, and by what."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._python_dispatch import TorchDispatchMode

import autofa
from autofa.dispatch import face, shortcut, state
from autofa.errors import UsageError
from autofa.runtime import python_face

pytestmark = pytest.mark.skipif(
    state.STATE.face is python_face.nobody, reason="this Python or torch is not served by it"
)


class Spy:
    """Stands in the function's place, and counts what it answers."""

    def __init__(self) -> None:
        self.answered = 0

    def __call__(self, *call: Any) -> Any:
        out = state.STATE.face(*call)
        self.answered += out is not None
        return out


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy()
    monkeypatch.setattr(face, "_face", spy)
    return spy


@pytest.fixture
def sdpa_wins() -> Iterator[None]:
    """Whatever is remembered is remembered as won by plain SDPA."""
    watching, trains = shortcut.MEMORY.watching, shortcut.TRAINING.watching
    shortcut.sdpa_won()
    yield
    shortcut.MEMORY.watching, shortcut.TRAINING.watching = watching, trains
    shortcut.forget()


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape).to(dtype) for _ in range(3)]


def remember(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
    given = {"is_causal": False, "enable_gqa": False, "trains": False, "sdpa_wins": True}
    python_face.remember(query, key, value, **(given | options))


@pytest.mark.usefixtures("sdpa_wins")
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (3, 5, 8)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_where_sdpa_wins(
    spy: Spy, shape: tuple[int, ...], causal: bool, scale: float | None
) -> None:
    query, key, value = tensors(*shape)
    remember(query, key, value, is_causal=causal)
    found = autofa.attention(query, key, value, is_causal=causal, scale=scale)
    assert spy.answered == 1
    assert found.equal(sdpa(query, key, value, is_causal=causal, scale=scale))
    assert found.is_contiguous()


@pytest.mark.usefixtures("sdpa_wins")
@pytest.mark.parametrize("scale", [None, 0.3])
def test_fewer_key_heads(spy: Spy, scale: float | None) -> None:
    query, (key, value, _) = torch.randn(2, 4, 5, 8), tensors(2, 2, 5, 8)
    remember(query, key, value, enable_gqa=True)
    found = autofa.attention(query, key, value, scale=scale, enable_gqa=True)
    assert spy.answered == 1
    assert found.equal(sdpa(query, key, value, scale=scale, enable_gqa=True))


@pytest.mark.usefixtures("sdpa_wins")
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)])
def test_strides_are_the_query_s(spy: Spy, order: tuple[int, ...]) -> None:
    query, key, value = (t.permute(order) for t in tensors(2, 3, 5, 8))
    remember(query, key, value)
    found = autofa.attention(query, key, value)
    assert spy.answered == 1
    assert found.stride() == torch.empty_like(query).stride()
    torch.testing.assert_close(found, sdpa(query, key, value))


@pytest.mark.usefixtures("sdpa_wins")
def test_what_is_not_ordinary_is_python_s(spy: Spy) -> None:
    query, key, value = tensors(1, 2, 6, 8)
    remember(query, key, value)
    overlapping = torch.randn(60).as_strided((1, 2, 6, 8), (0, 20, 2, 1))
    changes = {
        "rows that overlap": (overlapping, key, value),
        "a last stride of 2": (torch.randn(1, 2, 6, 16)[..., ::2], key, value),
        "a parameter": (torch.nn.Parameter(query), key, value),
    }
    for name, call in changes.items():
        found = autofa.attention(*call)
        assert spy.answered == 0, name
        torch.testing.assert_close(found, sdpa(call[0].contiguous(), key, value))
    for scale in (0.0, -1.0, float("nan")):
        autofa.attention(query, key, value, scale=scale)
    autofa.attention(query, key, value, dropout_p=0)
    assert spy.answered == 0
    autofa.attention(query, key, value)
    assert spy.answered == 1


@pytest.mark.usefixtures("sdpa_wins")
def test_only_the_very_call_is_remembered(spy: Spy) -> None:
    query, key, value = tensors(1, 2, 6, 8)
    remember(query, key, value)
    longer = torch.randn(1, 2, 7, 8)
    for call in ((query, longer, longer), (longer, key, value), (query[0], key[0], value[0])):
        autofa.attention(*call)
        assert spy.answered == 0
    for dtype in (torch.float64, torch.bfloat16):
        autofa.attention(query.to(dtype), key.to(dtype), value.to(dtype))
        assert spy.answered == 0
    with torch.enable_grad():
        autofa.attention(query.clone().requires_grad_(), key, value)
        assert spy.answered == 0
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        autofa.attention(query, key, value)
        assert spy.answered == 0
    finally:
        torch.set_num_threads(threads)
    shortcut.forget()
    autofa.attention(query, key, value)
    assert spy.answered == 0


@pytest.mark.usefixtures("sdpa_wins")
def test_errors_are_the_same(spy: Spy, capfd: pytest.CaptureFixture[str]) -> None:
    query, key, value = tensors(1, 2, 6, 8)
    remember(query, key, value)
    with pytest.raises(TypeError, match="dtype"):
        autofa.attention(query, key.double(), value)
    with pytest.raises(UsageError, match="length"):
        autofa.attention(query, key[:, :, :3], value)
    with pytest.raises(TypeError):
        autofa.attention(query, key, None)  # type: ignore[call-overload]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype"
        ragged = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 4)])
    autofa.attention(ragged, ragged, ragged)
    assert spy.answered == 0
    assert "aoti" not in capfd.readouterr().err


@pytest.mark.usefixtures("sdpa_wins")
def test_training(spy: Spy) -> None:
    query, key, value = (t.requires_grad_() for t in tensors(1, 2, 6, 8))
    remember(query, key, value, trains=True)
    found = autofa.attention(query, key, value)
    assert spy.answered == 1
    assert found.requires_grad
    mine = torch.autograd.grad(found.square().sum(), (query, key, value))
    theirs = torch.autograd.grad(sdpa(query, key, value).square().sum(), (query, key, value))
    for a, b in zip(mine, theirs, strict=True):
        assert a.equal(b)
    with torch.no_grad():
        autofa.attention(query, key, value)  # another memory
    assert spy.answered == 1


@pytest.mark.usefixtures("sdpa_wins")
def test_transforms_and_recorders_are_python_s(spy: Spy) -> None:
    query, key, value = tensors(3, 2, 6, 8)
    remember(query[0], key[0], value[0])
    found = torch.vmap(autofa.attention)(query, key, value)
    assert spy.answered == 0
    torch.testing.assert_close(found, sdpa(query, key, value))


def test_the_operator_is_called_where_sdpa_won_nothing(
    spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = tensors(1, 2, 6, 8)
    python_face.remember_query(query)
    found = autofa.attention(query, key, value)
    assert spy.answered == 1
    torch.testing.assert_close(found, sdpa(query, key, value))
    with torch.autocast("cpu"):
        assert autofa.attention(query, key, value).dtype == torch.bfloat16
    torch.use_deterministic_algorithms(True)
    try:
        autofa.attention(query, key, value)
    finally:
        torch.use_deterministic_algorithms(False)
        state.STATE.refresh()
    assert spy.answered == 1


def test_calls_without_the_dispatcher_own_what_they_give() -> None:
    assert python_face._adopter() is not None
    query, key, value = tensors(1, 2, 6, 8)
    found = autofa.attention(query, key, value)
    assert [t._use_count() for t in (query, key, value, found)] == [1, 1, 1, 1]  # type: ignore[attr-defined]
    assert not found.requires_grad
    with torch.inference_mode():
        assert autofa.attention(query, key, value).is_inference()


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.profiler.*")  # of torch 2.11
def test_what_listens_to_the_dispatcher_hears_of_every_call() -> None:
    query, key, value = tensors(1, 2, 6, 8)
    with _Seen() as seen:
        autofa.attention(query, key, value)
    assert "autofa.fwd.default" in seen.names
    with torch.profiler.profile() as profile:
        autofa.attention(query, key, value)
    assert "autofa::fwd" in {event.name for event in profile.events()}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("kind", ["negative", "zero", "functional"])
def test_tensors_that_are_not_what_lies_in_memory(kind: str, place: int) -> None:
    call = tensors(1, 2, 6, 8)
    plain = list(call)
    if kind == "negative":
        call[place] = torch._neg_view(call[place])
        plain[place] = call[place].clone()
    elif kind == "zero":
        call[place] = torch._efficientzerotensor((1, 2, 6, 8))
        plain[place] = torch.zeros(1, 2, 6, 8)
    else:
        call = [torch._to_functional_tensor(t) for t in call]
    found: Tensor = autofa.attention(call[0], call[1], call[2])
    if kind == "functional":
        torch._sync(found)  # type: ignore[attr-defined, no-untyped-call]
        found = torch._from_functional_tensor(found)
    torch.testing.assert_close(found, sdpa(plain[0], plain[1], plain[2]))


def test_a_torch_that_keeps_tensors_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_face, "_payload", lambda: None)
    assert python_face.open_face(state.STATE.fwd, shortcut.restride) is python_face.nobody
