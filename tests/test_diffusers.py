"""diffusers with autofa: by its attention backend, and by patched SDPA where models have none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autofa
from autofa.errors import UsageError

os.environ.setdefault("HF_HUB_OFFLINE", "1")
diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

from autofa.integrations import diffusers as ours  # noqa: E402
from autofa.integrations import sdpa_patch  # noqa: E402

PAGE = Path(__file__).resolve().parent.parent / "docs" / "diffusers.md"
EXAMPLES = [part.split("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:Dynamo detected a call to a .functools.lru_cache:UserWarning",  # diffusers 0.37
)


@pytest.fixture(autouse=True)
def backend_restored() -> Iterator[None]:
    ours.register()
    with diffusers.attention_backend("native"):
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The query's shape of each call that autofa gets."""
    seen: list[tuple[int, ...]] = []
    attention = autofa.attention

    def noted(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(tuple(query.shape))
        return attention(query, *args, **kwargs)

    monkeypatch.setattr(ours, "attention", noted)
    monkeypatch.setattr(sdpa_patch, "attention", noted)
    return seen


def run(example: str) -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    return names


@pytest.mark.parametrize("example", EXAMPLES, ids=["backend", "patched"])
def test_the_page_s_examples_say_what_sdpa_says(
    example: str, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    got = run(example)["out"]
    assert calls
    count = len(calls)
    plain = example.replace('"autofa"', '"native"').replace(", autofa.patch_sdpa()", "")
    want = run(plain)["out"]
    assert len(calls) == count
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_block_of_the_backend(calls: list[tuple[int, ...]]) -> None:
    query, key, value = (torch.randn(2, n, 4, 8) for n in (5, 7, 7))
    dispatch = diffusers.models.attention_dispatch.dispatch_attention_fn
    padding = torch.ones(2, 7, dtype=torch.bool)
    padding[1, 4:] = False
    for options in ({}, {"attn_mask": padding}, {"is_causal": True}, {"scale": 0.5}):
        want = dispatch(query, key, value, **options)
        with diffusers.attention_backend("autofa"):
            got = dispatch(query, key, value, **options)
        assert got.shape == (2, 5, 4, 8)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert calls == [(2, 4, 5, 8)] * 4


def test_a_compiled_model_says_the_same() -> None:
    names = run(EXAMPLES[0])
    model = names["model"]
    query = torch.randn(1, 6, 2, 8)
    dispatch = diffusers.models.attention_dispatch.dispatch_attention_fn
    backend = model.transformer_blocks[0].attn.processor._attention_backend
    assert backend == "autofa"
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(dispatch, fullgraph=True, backend="eager")
        got = compiled(query, query, query, backend=backend)
        torch.testing.assert_close(got, dispatch(query, query, query), rtol=1e-4, atol=1e-5)


def test_registering_twice_adds_one_name() -> None:
    ours.register()
    names = diffusers.AttentionBackendName
    assert [name.value for name in names].count("autofa") == 1
    assert names("autofa") is names["AUTOFA"]


def test_what_the_backend_does_not_have_is_refused() -> None:
    query = torch.randn(1, 6, 2, 8)
    with pytest.raises(UsageError, match="return_lse: got True"):
        ours.attend(query, query, query, return_lse=True)
    with pytest.raises(UsageError, match="context parallelism"):
        ours.attend(query, query, query, _parallel_config=object())


def test_another_diffusers_is_said_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(diffusers.models.attention_dispatch, "_check_shape")
    with pytest.raises(ImportError, match=r"_check_shape.*patch_sdpa"):
        ours.register()
