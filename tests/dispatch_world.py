"""A machine whose measurements the test makes up, for the tests of dispatch and of attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from store_samples import make_row
from torch import Tensor

from autofa import settings
from autofa.compiler import build, fingerprint
from autofa.dispatch import state
from autofa.kernels import REGISTRY
from autofa.kernels.family import Variant
from autofa.kernels.vendor import VendorKernel
from autofa.problem import Problem, parse_shape
from autofa.runtime import devices, extension
from autofa.store.repository import Repository
from autofa.store.rows import Row


def problem(shape: str, mask: str = "none", dtype: str = "f32") -> Problem:
    return parse_shape(shape, dtype=dtype, mask=mask, device="cpu")


def flash(dtype: str = "f32") -> Variant:
    """The default variant of cpu.flash on this machine."""
    found = REGISTRY.family("cpu.flash").default_variant(
        problem("1,8,64,64", dtype=dtype), devices.limits("cpu")
    )
    assert found is not None
    return found


def built(variant: Variant) -> Path:
    """Its library, compiled at most once per test session."""
    target = variant.target(devices.limits("cpu"))
    result = build([(variant, target)], settings.load())[0]
    assert result.library is not None, result.message
    return result.library


def row(slug: str, shape: Problem, ms: float, **fields: object) -> Row:
    """A valid row of this CPU that takes `ms` where plain SDPA takes 1 ms."""
    candidate = REGISTRY.candidate(slug)
    if isinstance(candidate, VendorKernel):
        mark = f"{candidate.library}=={candidate.version()}"
    else:
        mark = fingerprint(candidate, candidate.target(devices.limits("cpu")))
    values = {"device": devices.device_key("cpu"), "problem": shape, "fingerprint": mark}
    return make_row(slug, ms, family=candidate.family_name, **{**values, **fields})


def tuned(shape: Problem, own_ms: float = 0.5, **fields: object) -> list[Row]:
    """What a tune leaves: cpu.flash at `own_ms`, plain SDPA at 1 ms."""
    return [row(flash(shape.dtype).slug, shape, own_ms, **fields), row("torch.sdpa", shape, 1.0)]


def store(rows: Iterable[Row]) -> Path:
    """Writes rows to the test's database, and makes this process forget what it knew."""
    path = Path(settings.database(settings.load()))
    with Repository.open(path, write=True) as repository:
        repository.add(rows)
    state.reload()
    extension.set_miss(state._miss)  # tests of the runtime put their own in its place
    return path


def inputs(shape: Problem, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[shape.dtype]

    def make(heads: int, length: int, width: int) -> Tensor:
        size = (shape.batch, heads, length, width)
        return torch.randn(size, generator=generator).to(dtype)

    p = shape
    return (
        make(p.heads_q, p.seqlen_q, p.head_dim),
        make(p.heads_kv, p.seqlen_k, p.head_dim),
        make(p.heads_kv, p.seqlen_k, p.head_dim_v),
    )


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention in float64 from its definition; rows with nothing to attend to give 0."""
    q, k, v = (t.double() for t in (query, key, value))
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask.double()
    return scores.softmax(-1).nan_to_num(0.0) @ v


def assert_close(got: Tensor, want: Tensor) -> None:
    """Within what the dtype of `got` allows for normal inputs."""
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3}.get(got.dtype, 3e-2)
    torch.testing.assert_close(
        got.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


@contextmanager
def no_defaults() -> Iterator[None]:
    """Lets our own kernels answer only where they were measured."""
    rules = {family: family.unmeasured for family in REGISTRY.families}
    for family in rules:
        object.__setattr__(family, "unmeasured", lambda problem, limits: False)
    try:
        yield
    finally:
        for family, rule in rules.items():
            object.__setattr__(family, "unmeasured", rule)


def stale(made: Row) -> Row:
    """The same row, measured with other sources or another library version."""
    return replace(made, fingerprint="torch==1.0" if "==" in made.fingerprint else "0" * 32)
