"""`cpu.decode`: what it promises beyond what every CPU family does (test_cpu_families.py)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpu_variants import TORCH, Case, Library, check, explicit_mask, qkv

from autofa.device import cpu_info, cpu_limits, named_limits
from autofa.kernels.families.cpu_decode import FAMILY as CPU_DECODE
from autofa.problem import EXPLICIT_MASKS, MASKS, parse_shape


@pytest.fixture(autouse=True)
def three_torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=list(TORCH))
def library(request: pytest.FixtureRequest, session_cache: Path) -> Library:
    """The default of this machine."""
    if cpu_info().level < 3:
        pytest.skip("this CPU is no x86-64-v3")
    problem = parse_shape("1,8,1/512,64", dtype=request.param, device="cpu")
    variant = CPU_DECODE.default_variant(problem, cpu_limits())
    assert variant is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOFA_CACHE_DIR", str(session_cache))
        return Library(variant, cpu_limits())


@pytest.mark.parametrize("mask", MASKS)
def test_weights_keep_the_precision_of_f32(library: Library, mask: str) -> None:
    rng = random.Random(mask)
    for case in (Case(1, 3000, 64, 64), Case(16, 700, 20, 72), Case(3, 300, 128, 128, 12, 2)):
        assert check(library, rng, case, mask, exact_weights=True)


@pytest.mark.parametrize("mask", MASKS)
def test_every_number_of_rows_per_key_head(library: Library, mask: str) -> None:
    """Rows of a key head are cut into tiles, ranges and their padded rests."""
    rng = random.Random(mask)
    for nq, group in ((1, 3), (1, 5), (3, 2), (1, 7), (5, 2), (3, 5), (11, 3), (16, 5)):
        assert check(library, rng, Case(nq, 530, 16, 16, 2 * group, 2), mask, exact_weights=True)


@pytest.mark.parametrize("mask", ["none", "causal_lower_right", *EXPLICIT_MASKS])
def test_same_bits_on_any_number_of_threads(library: Library, mask: str) -> None:
    rng = random.Random(6)
    case = Case(3, 2100, 64, 64, 4, 2)
    tensors = qkv(library, rng, case)
    attn_mask = explicit_mask(library, rng, case, mask) if mask in EXPLICIT_MASKS else None
    first = library.attend(tensors, mask=mask, attn_mask=attn_mask)
    for threads in (2, 3, 100):
        again = library.attend(tensors, threads, mask=mask, attn_mask=attn_mask)
        assert torch.equal(again, first)


@pytest.mark.parametrize(
    ("shape", "dtype", "mask", "arch", "expected"),
    [
        ("1,8,1/4096,64", "f32", "none", "x86-64-v4", True),
        ("1,8,1/4096,64", "f32", "none", "x86-64-v3", True),
        ("1,32/8,4/4096,128", "f16", "additive", "x86-64-v4", True),
        ("1,32/8,4/4096,128", "f16", "none", "x86-64-v3", False),
        ("1,8,1/4096,64", "bf16", "none", "x86-64-v4", False),
        ("1,32/8,1/4096,128", "bf16", "none", "x86-64-v4", True),
        ("1,32/8,1/4096,128", "bf16", "none", "x86-64-v3", False),
        ("1,8,9/4096,64", "f32", "none", "x86-64-v4", False),
        ("1,32/1,2/512,64", "f32", "none", "x86-64-v4", False),
        ("1,8,1/4096,512", "f32", "none", "x86-64-v4", True),
        ("1,8,1/4096,512", "f32", "none", "x86-64-v3", False),
        ("1,8,1/4096,1024", "f32", "none", "x86-64-v4", False),
    ],
)
def test_answers_unmeasured_only_where_it_was_clearly_faster(
    shape: str, dtype: str, mask: str, arch: str, expected: bool
) -> None:
    problem = replace(parse_shape(shape, dtype=dtype, mask=mask), device="cpu")
    assert CPU_DECODE.unmeasured(problem, named_limits(arch)) is expected
