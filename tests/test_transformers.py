"""`attn_implementation="autofa"`: models of transformers say with it what they say with sdpa."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_world import flash
from torch import Tensor

from autofa import force_kernel

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from autofa.errors import UsageError  # noqa: E402
from autofa.integrations import transformers as ours  # noqa: E402

DOCS = Path(__file__).resolve().parent.parent / "docs"
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
}
MODELS = {
    "bert": ("BertModel", "BertConfig", {**SMALL, "num_attention_heads": 4}),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**SMALL, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {
            **SMALL,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "sliding_window": 8,
            "use_sliding_window": True,
            "max_window_layers": 1,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 256,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
}
DECODERS = ("llama", "qwen2")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    ours.register()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of each call that autofa gets, with the shapes of query and key."""
    seen: list[dict[str, Any]] = []
    attention = ours.attention

    def noted(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Tensor:
        seen.append({"query": tuple(query.shape), "key": tuple(key.shape), **rest})
        return attention(query, key, value, **rest)

    monkeypatch.setattr(ours, "attention", noted)
    return seen


def pair(name: str) -> tuple[Any, Any]:
    """The same model with sdpa and with autofa."""
    model, config, values = MODELS[name]
    if not getattr(transformers, model)._supports_sdpa:
        pytest.skip(f"this transformers' {model} cannot choose sdpa")
    torch.manual_seed(0)
    made = []
    for implementation in ("sdpa", "autofa"):
        settings = getattr(transformers, config)(**values, attn_implementation=implementation)
        made.append(getattr(transformers, model)(settings).eval())
        assert made[-1].config._attn_implementation == implementation
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def prompt(padded: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 250, (2, 17), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def output(name: str, model: Any, given: dict[str, Tensor]) -> Tensor:
    if name == "t5":
        given = {**given, "decoder_input_ids": given["input_ids"][:, :6]}
    out = model(**given)
    result: Tensor = out.last_hidden_state if name == "bert" else out.logits
    return result


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_sdpa(name: str, padded: bool, calls: list[dict[str, Any]]) -> None:
    sdpa, autofa = pair(name)
    with torch.no_grad():
        want, got = (output(name, model, prompt(padded)) for model in (sdpa, autofa))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(calls) == (6 if name == "t5" else 2), "one call per attention of the model"


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_an_own_kernel_serves_the_layers(name: str) -> None:
    sdpa, autofa = pair(name)
    with torch.no_grad():
        want = output(name, sdpa, prompt(padded=True))
        with force_kernel(flash().slug):
            got = output(name, autofa, prompt(padded=True))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not torch.equal(got, want), "no two kernels round alike"


@pytest.mark.parametrize(
    "how", [{}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 3}]
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_is_token_equal(
    name: str, padded: bool, how: dict[str, Any], calls: list[dict[str, Any]]
) -> None:
    sdpa, autofa = pair(name)
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    want, got = (m.generate(**prompt(padded), **options, **how) for m in (sdpa, autofa))
    assert got.shape == (2, 33)
    assert torch.equal(got, want)
    heads = autofa.config.num_key_value_heads
    decoding = [
        call
        for call in calls
        if call["query"][2] == MODELS[name][2]["num_attention_heads"] // heads
    ]
    assert decoding, "heads of a group are rows of one call"
    assert all(call["query"][1] == heads and not call["enable_gqa"] for call in decoding)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_sdpa(name: str) -> None:
    models = pair(name)
    for model in models:
        output(name, model, prompt(padded=True)).square().mean().backward()
    pairs = list(zip(*(model.parameters() for model in models), strict=True))
    grads = [(a.grad, b.grad) for a, b in pairs if a.grad is not None]
    assert len(grads) > 10
    for want, got in grads:
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def test_a_compiled_model_says_the_same() -> None:
    sdpa, autofa = pair("llama")
    ids = prompt(False)["input_ids"]
    torch.compiler.reset()
    compiled = torch.compile(autofa, fullgraph=True, backend="eager")
    with torch.no_grad():
        for length in (17, 9):
            want = sdpa(ids[:, :length], use_cache=False).logits
            got = compiled(ids[:, :length], use_cache=False).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_model_is_switched_to_it(calls: list[dict[str, Any]]) -> None:
    sdpa, _ = pair("llama")
    sdpa.set_attn_implementation("autofa")
    with torch.no_grad():
        sdpa(**prompt(False))
    assert len(calls) == 2


def test_patched_sdpa_serves_models_that_keep_their_sdpa() -> None:
    import autofa as package

    sdpa, _ = pair("llama")
    with torch.no_grad():
        want = sdpa(**prompt(True)).logits
        with package.patch_sdpa():
            got = sdpa(**prompt(True)).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [None, torch.bool, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_masks_biases_and_room_for_more_keys(
    rows: int, biased: bool, masked: torch.dtype | None, calls: list[dict[str, Any]]
) -> None:
    """Against SDPA with one additive mask; 8 keys, of which a prefill has filled 5."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, h, n, 8) for h, n in ((4, rows), (2, 8), (2, 8)))
    seen = torch.ones(rows, 8, dtype=torch.bool)
    if masked is None and rows > 1:
        seen = seen.tril()
    elif masked is not None:
        seen[:, 3] = False
    bias = torch.randn(1, 4, rows, 8) if biased else None
    full = torch.where(seen, 0.0 if bias is None else bias, float("-inf")).expand(2, 4, rows, 8)
    want = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, full, scale=0.3, enable_gqa=True
    )
    mask = None
    if masked is not None:
        mask = seen if masked is torch.bool else torch.zeros(rows, 8).masked_fill(~seen, -1e30)
        mask = mask.expand(2, 1, rows, 8)
    got, weights = ours.attend(
        torch.nn.Module(), query, key, value, mask, scaling=0.3, position_bias=bias
    )
    assert weights is None
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-4, atol=1e-5)
    assert calls[0]["key"][2] == (5 if masked is None and rows == 5 else 8)


def test_softcap_is_refused() -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(UsageError, match="softcap: got 30"):
        ours.attend(torch.nn.Module(), q, q, q, None, softcap=30.0)


def test_the_page_s_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = (DOCS / "transformers.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, "docs/transformers.md", "exec"), {})
    assert capsys.readouterr().out.startswith("tensor([[")
