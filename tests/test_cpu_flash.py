"""`cpu.flash`: what it promises beyond what every CPU family does (test_cpu_families.py)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpu_variants import PARALLEL_FOR, TORCH, Case, Library, check, qkv, torch_threads

from autofa.device import cpu_info, cpu_limits, named_limits
from autofa.kernels.families.cpu_flash import FAMILY as CPU_FLASH
from autofa.problem import parse_shape
from autofa.runtime import abi


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=list(TORCH))
def library(request: pytest.FixtureRequest, session_cache: Path) -> Library:
    """The default of this machine."""
    if cpu_info().level < 3:
        pytest.skip("this CPU is no x86-64-v3")
    problem = parse_shape("1,8,512,64", dtype=request.param, device="cpu")
    variant = CPU_FLASH.default_variant(problem, cpu_limits())
    assert variant is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOFA_CACHE_DIR", str(session_cache))
        return Library(variant, cpu_limits())


@pytest.mark.parametrize("mask", CPU_FLASH.domain.masks)
def test_weights_keep_the_precision_of_f32(library: Library, mask: str) -> None:
    rng = random.Random(mask)
    for case in (Case(70, 600, 64, 64), Case(65, 129, 20, 72), Case(1, 300, 128, 128)):
        assert check(library, rng, case, mask, exact_weights=True)


def test_same_bits_on_any_number_of_threads(library: Library) -> None:
    tensors = qkv(library, random.Random(6), Case(150, 150, 64, 64))
    torch.set_num_threads(3)
    for mask in ("none", "causal"):
        first = library.attend(tensors, mask=mask)
        for threads in (2, 3):
            assert torch.equal(library.attend(tensors, threads, mask=mask), first)


def test_one_task_per_panel_and_none_for_small_problems(library: Library) -> None:
    calls: list[tuple[int, int]] = []

    @PARALLEL_FOR
    def count(begin: int, end: int, grain: int, fn: Callable[..., None], arg: int) -> int:
        calls.append((begin, end))
        fn(begin, end, arg)
        return 0

    for nq, expected in ((3, []), (300, [(0, 7)])):
        tensors = qkv(library, random.Random(7), Case(nq, nq, 32, 32))
        out = torch.empty(tensors[0].shape, dtype=library.torch_dtype)
        calls.clear()
        assert library.call(library.params(tensors, out), count, 7) == abi.OK
        assert calls == expected


def test_no_memory_is_said_and_nothing_written(library: Library) -> None:
    tensors = qkv(library, random.Random(10), Case(4, 4, 8, 8))
    out = torch.full((2, 2, 4, 8), 7.0, dtype=library.torch_dtype)
    params = library.params(tensors, out)
    params.head_dim = 2**42
    assert library.call(params, torch_threads(), 2) == abi.NO_MEMORY
    assert (out == 7).all()


@pytest.mark.parametrize("arch", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("dtype", list(TORCH))
def test_the_space_is_small_and_of_one_instruction_set(arch: str, dtype: str) -> None:
    problem = parse_shape("1,8,512,64", dtype=dtype, device="cpu")
    variants = CPU_FLASH.legal(problem, named_limits(arch))
    assert 4 <= len(variants) <= 24
    assert {v.target(named_limits(arch)) for v in variants} == {arch}


@pytest.mark.parametrize(
    ("shape", "dtype", "mask", "features", "expected"),
    [
        ("1,8,512,64", "f32", "none", (), True),
        ("1,8,1/4096,64", "f32", "none", (), False),
        ("1,8,512/4,64", "f32", "causal", (), False),
        ("1,1,8,8", "f32", "none", (), True),
        ("1,8,16/32,64", "f32", "causal", (), True),
        ("1,8,1/64,64", "f32", "none", (), False),
        ("1,8,8,512", "f32", "none", (), False),
        ("1,8,512,512", "f32", "none", (), False),
        ("1,8,512,64", "f32", "additive", (), True),
        ("1,8,1/512,64", "f32", "bool", (), False),
        ("1,8,512,64", "bf16", "none", (), True),
        ("1,8,512,64", "bf16", "none", ("amx_bf16",), False),
        ("1,8,512,64", "f16", "none", ("amx_bf16",), True),
    ],
)
def test_answers_unmeasured_only_where_it_was_clearly_faster(
    shape: str, dtype: str, mask: str, features: tuple[str, ...], expected: bool
) -> None:
    limits = replace(named_limits("x86-64-v4"), features=frozenset(features))
    problem = parse_shape(shape, dtype=dtype, mask=mask, device="cpu")
    assert CPU_FLASH.unmeasured(problem, limits) is expected
