"""Every CUDA family: right on the emulator, compiles everywhere, well declared.

Parametrised over the declarations: a family that is added is tested here without a line of its own.
"""

from __future__ import annotations

import functools
from ctypes import CDLL
from pathlib import Path

import cuda_variants
import pytest
import torch
from cuda_variants import CASES, Case, Kind

from autofa import compiler
from autofa.device import CUDA_ARCHS, cuda_limits
from autofa.kernels import REGISTRY
from autofa.kernels.family import KernelFamily, Variant
from autofa.problem import MASKS, Problem
from autofa.runtime import abi
from autofa.settings import Settings

ARCHS = tuple(a for a in CUDA_ARCHS if cuda_limits(a).capability >= 80)
FAMILIES = tuple(f for f in REGISTRY.families if f.domain.device == "cuda")
HEAD_DIMS = (8, 40, 64, 72, 96, 128, 160, 192, 256, 320, 512, 576, 640, 1024)
H200 = cuda_limits("sm_90a", 132)
FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)

# Every mask, both dtypes, head dims that fill a tile and that do not.
KINDS = (
    Kind("f16", "causal", 64),
    Kind("bf16", "bool", 40),
    Kind("f16", "additive", 72),
    Kind("bf16", "causal_lower_right", 128),
    Kind("f16", "none", 8),
    Kind("bf16", "additive", 64),
)
# For families of large head dims only, and of the largest.
_WIDE_KINDS = (Kind("f16", "causal", 288), Kind("bf16", "none", 512))
_WIDEST_KINDS = (Kind("f16", "causal", 520), Kind("bf16", "none", 1024))
# Their cases in turn: each variant takes some, all together take each twice.
_CASES_EACH = 4
_SLOW_KINDS = (
    *(Kind("f16", mask, 96) for mask in MASKS),
    *(Kind("bf16", mask, 256) for mask in MASKS),
    Kind("f16", "causal", 320),
    Kind("bf16", "bool", 576),
)


@functools.cache
def sample(family: KernelFamily) -> list[Variant]:
    kinds = next(
        kinds
        for kinds in (KINDS, _WIDE_KINDS, _WIDEST_KINDS)
        if kinds[0].head_dim in family.domain.head_dims
    )
    return cuda_variants.cover(family, kinds, H200)


def emulated_cases() -> list[object]:
    found = []
    for family in FAMILIES:
        for index, variant in enumerate(sample(family)):
            for step in range(_CASES_EACH):
                case = CASES[(index * _CASES_EACH + step) % len(CASES)]
                found.append(pytest.param(variant, case, id=f"{variant.slug}-{case.name}"))
    return found


@pytest.fixture(scope="module")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("emulated")
    return functools.cache(lambda variant: cuda_variants.emulated(variant, folder))


@pytest.mark.parametrize(("variant", "case"), emulated_cases())
def test_right_on_the_emulator(emulate: object, variant: Variant, case: Case) -> None:
    assert callable(emulate)
    cuda_variants.check(emulate(variant), variant, case)


@pytest.mark.slow
@FAMILY
def test_more_are_right_on_the_emulator(family: KernelFamily, tmp_path: Path) -> None:
    for variant in cuda_variants.cover(family, _SLOW_KINDS, H200):
        library = cuda_variants.emulated(variant, tmp_path)
        for case in CASES:
            cuda_variants.check(library, variant, case)


@FAMILY
def test_refuses_what_it_was_not_compiled_for(emulate: object, family: KernelFamily) -> None:
    assert callable(emulate)
    variant = sample(family)[0]
    assert (variant.dtype, variant.mask) == ("f16", "causal")
    dim = variant.head_dim
    assert dim is not None
    library: CDLL = emulate(variant)

    def code(q: torch.Tensor, mask: str = "causal", attn_mask: torch.Tensor | None = None) -> int:
        return cuda_variants.launch(library, mask, (q, q, q, q), attn_mask=attn_mask)

    whole = torch.zeros(1, 2, 16, dim, dtype=torch.float16)
    odd_rows = torch.zeros(1, 2, 15, dim + 4, dtype=torch.float16)[..., :dim]
    odd_start = torch.zeros(1 + whole.numel(), dtype=torch.float16)[1:].view(whole.shape)
    assert code(whole) == abi.OK
    assert code(odd_rows[:, :, :1]) == abi.REFUSED  # heads are 15 odd rows apart
    assert code(odd_rows[:, :1, :1]) == abi.OK  # its strides lead nowhere
    assert code(odd_rows) == code(odd_start) == abi.REFUSED
    assert code(torch.zeros(1, 2, 16, 2 * dim, dtype=torch.float16)) == abi.REFUSED
    assert code(torch.zeros(1, 2, 16, dim - 8, dtype=torch.float16)) == abi.REFUSED
    assert code(whole, "none") == code(whole, "causal_lower_right") == abi.REFUSED
    assert code(whole.to(torch.bfloat16)) == abi.REFUSED
    everything = torch.ones(1, 2, 16, 16, dtype=torch.bool)
    assert code(whole, "bool", everything) == abi.REFUSED
    empty = torch.zeros(0, 2, 16, dim, dtype=torch.float16)
    assert code(empty) == abi.OK


@FAMILY
@pytest.mark.parametrize("arch", ARCHS)
def test_defaults_are_legal(family: KernelFamily, arch: str) -> None:
    limits = cuda_limits(arch, 100)
    for dtype in family.domain.dtypes:
        for mask in family.domain.masks:
            for head_dim in (d for d in HEAD_DIMS if d in family.domain.head_dims):
                for heads, rows in ((8, 1), (32, 16), (8, 65), (8, 8191)):
                    sizes = (1, heads, 8, rows, rows, head_dim, head_dim)
                    problem = Problem(dtype, *sizes, mask)
                    if family.domain.refusal(problem, limits) is not None:
                        continue  # a family of other architectures
                    default = family.default_variant(problem, limits)
                    assert default is not None
                    assert default.refusal(problem, limits) is None, (problem, default)


@FAMILY
def test_the_space_is_modest(family: KernelFamily) -> None:
    for head_dim in (d for d in HEAD_DIMS if d in family.domain.head_dims):
        problem = cuda_variants.long_problem(family, Kind("bf16", "none", head_dim), H200)
        assert problem is not None
        legal = family.legal(problem, H200)
        assert sum(v.accuracy("bf16") == "f32" for v in legal) <= 40, head_dim
        if family.name.startswith("mma."):
            assert len({v.params.stages for v in legal}) > 1, head_dim


@pytest.mark.nvcc
@FAMILY
def test_defaults_compile_without_spilling(family: KernelFamily, here: Settings) -> None:
    """On every architecture that it serves, at head dims from small to large, with every mask."""
    served = [d for d in HEAD_DIMS if d in family.domain.head_dims]
    wanted = []
    for index, arch in enumerate(("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")):
        limits = cuda_limits(arch, 100)
        head_dim = served[(len(served) - 1) * index // 4]
        masks = family.domain.masks
        kind = Kind(("f16", "bf16")[index % 2], masks[3 * index % len(masks)], head_dim)
        problem = cuda_variants.long_problem(family, kind, limits)
        if problem is not None:
            default = family.default_variant(problem, limits)
            assert default is not None
            wanted.append((default, arch))
    assert wanted
    for done in compiler.build(wanted, here, jobs=2):
        assert done.library is not None, done.message
        assert done.usage is not None
        assert done.usage.spill_bytes == 0, (done.variant.slug, done.target, done.usage)
