"""mma.split_q: right on the emulator and on a GPU, compiles everywhere, well declared."""

from __future__ import annotations

from collections import Counter
from ctypes import CDLL
from pathlib import Path

import cuda_variants
import pytest
import torch
from cuda_variants import CASES, Case

from autofa import compiler
from autofa.device import CUDA_ARCHS, cuda_build_arch, cuda_limits
from autofa.kernels.catalog import listing
from autofa.kernels.families.split_q import FAMILY as SPLIT_Q
from autofa.kernels.family import Variant
from autofa.problem import Problem
from autofa.runtime import abi
from autofa.settings import Settings

CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def variant_of(text: str) -> Variant:
    found = SPLIT_Q.parse(f"mma.split_q-{text}")
    assert found is not None
    return found


# Between them: both pipelines, one and two row tiles per warp, both dtypes, all three masks.
EMULATED = ("d64-m64n32-w4-s2-f16-causal", "d64-m128n64-w4-s1-bf16-causal_lower_right")


@pytest.fixture(scope="module", params=EMULATED)
def emulated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[CDLL, Variant]:
    variant = variant_of(request.param)
    return cuda_variants.emulated(variant, tmp_path_factory.mktemp("emulated")), variant


@CASE
def test_right_on_the_emulator(emulated: tuple[CDLL, Variant], case: Case) -> None:
    library, variant = emulated
    cuda_variants.check(library, variant, case)


@pytest.mark.slow
@CASE
@pytest.mark.parametrize("text", ["d128-m128n32-w8-s1-f16-none", "d128-m64n64-w4-s2-bf16-none"])
def test_right_at_head_dim_128_on_the_emulator(text: str, case: Case, tmp_path: Path) -> None:
    variant = variant_of(text)
    cuda_variants.check(cuda_variants.emulated(variant, tmp_path), variant, case)


def test_refuses_what_it_was_not_compiled_for(emulated: tuple[CDLL, Variant]) -> None:
    library, variant = emulated
    dtype, mask = cuda_variants.TORCH[str(variant.dtype)], str(variant.mask)

    def code(q: torch.Tensor, mask: str = mask) -> int:
        return cuda_variants.launch(library, mask, (q, q, q, q))

    whole = torch.zeros(1, 2, 16, 64, dtype=dtype)
    odd_rows = torch.zeros(1, 2, 15, 68, dtype=dtype)[..., :64]
    odd_start = torch.zeros(1 + whole.numel(), dtype=dtype)[1:].view(whole.shape)
    assert code(whole) == abi.OK
    assert code(odd_rows[:, :, :1]) == abi.REFUSED  # heads are 15 odd rows apart
    assert code(odd_rows[:, :1, :1]) == abi.OK  # its strides lead nowhere
    assert code(odd_rows) == code(odd_start) == abi.REFUSED
    assert code(torch.zeros(1, 2, 16, 128, dtype=dtype)) == abi.REFUSED
    assert code(whole, "none") == abi.REFUSED
    assert code(whole.to(torch.float16 if dtype == torch.bfloat16 else torch.bfloat16)) != abi.OK


def test_an_empty_call_launches_nothing(emulated: tuple[CDLL, Variant]) -> None:
    library, variant = emulated
    empty = torch.zeros(0, 2, 16, 64, dtype=cuda_variants.TORCH[str(variant.dtype)])
    tensors = (empty, empty, empty, empty)
    assert cuda_variants.launch(library, str(variant.mask), tensors) == abi.OK


@pytest.mark.parametrize("arch", [a for a in CUDA_ARCHS if cuda_limits(a).capability >= 80])
def test_the_space_is_modest_and_never_empty(arch: str) -> None:
    limits = cuda_limits(arch)
    counts = Counter((v.dtype, v.head_dim, v.mask) for v in listing(SPLIT_Q, limits).legal)
    assert len(counts) == 2 * 2 * 3
    assert all(2 <= count <= 24 for count in counts.values())
    for dtype, head_dim, mask in counts:
        problem = Problem(str(dtype), 1, 8, 8, 999, 999, head_dim, head_dim, str(mask))
        default = SPLIT_Q.default_variant(problem, limits)
        assert default is not None
        assert default.refusal(problem, limits) is None


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"])
def test_compiles_without_spilling_much(arch: str, here: Settings) -> None:
    # The most registers per thread of the declared space.
    texts = {"sm_90a": ("d128-m128n64-w4-s1-f16-causal", "d64-m128n128-w4-s1-bf16-none")}
    chosen = texts.get(arch, texts["sm_90a"][:1])
    for done in compiler.build([(variant_of(text), arch) for text in chosen], here, jobs=1):
        assert done.library is not None, done.message
        assert done.usage is not None
        assert done.usage.spill_bytes <= 128


@pytest.mark.gpu
@pytest.mark.nvcc
def test_right_on_the_gpu(here: Settings) -> None:
    major, minor = torch.cuda.get_device_capability()
    limits = cuda_limits(cuda_build_arch(10 * major + minor))
    texts = ["m64n32-w4-s2", "m64n96-w4-s1", "m64n128-w4-s2", "m128n64-w4-s2", "m128n64-w8-s1"]
    variants = [
        variant_of(f"d{head_dim}-{text}-{dtype}-{mask}")
        for text in texts
        for head_dim, dtype in ((64, "bf16"), (128, "f16"))
        for mask in ("none", "causal", "causal_lower_right")
    ]
    for done in compiler.build([(v, v.target(limits)) for v in variants], here):
        assert done.library is not None, done.message
        library = cuda_variants.load(done.library)
        for case in CASES:
            cuda_variants.check(library, done.variant, case, device="cuda:0")
