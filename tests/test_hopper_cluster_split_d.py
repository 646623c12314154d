"""hopper.cluster_split_d: what the tests of all CUDA families leave out. Steps of which one block
has no keys, other value head dims and chunks on the emulator; where its domain ends; what ptxas
makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cuda_variants
import pytest
from cuda_variants import CASES, Case

from autofa import compiler
from autofa.device import CUDA_ARCHS, cuda_limits
from autofa.kernels.families.hopper_cluster_split_d import FAMILY
from autofa.problem import Problem
from autofa.settings import Settings

H200 = cuda_limits("sm_90a", 132)
# What the emulator's one cluster makes of it: tiles one after the other, of which the halves of the
# last step are needed by both warpgroups, by one or by none.
SHAPES = (
    Case("many tiles", 3, 1, 330, 330, layout="bnhd", batch=2),
    Case("rows before the keys", 2, 1, 420, 130),
    Case("a diagonal off the steps", 1, 1, 200, 300),
    Case("one half only", 2, 2, 130, 50),
    Case("rescaled in each step", 1, 1, 150, 460, growing=True),
)


def check(text: str, folder: Path, *cases: Case) -> None:
    cuda_variants.check_emulated(cuda_variants.named(FAMILY, text, H200), folder, *cases)


def test_halves_of_steps_on_the_emulator(tmp_path: Path) -> None:
    check("d320-m128n128-v320-c3x64-s4-p0-h4-f16-causal_lower_right", tmp_path, *SHAPES)


def test_value_head_dims_of_their_own_on_the_emulator(tmp_path: Path) -> None:
    ragged = next(case for case in CASES if case.name == "ragged")
    cases = [replace(ragged, head_dim_v=dim) for dim in (328, 384)]
    check("d264-m128n128-v384-c2x32-s7-p1-h1-bf16-none", tmp_path, *cases)


def test_two_products_of_a_block_on_the_emulator(tmp_path: Path) -> None:
    """The output of 320 columns, and of 288, of which the blocks share the group between them."""
    some = [case for case in CASES if case.name in ("ragged", "more queries")]
    check("d640-m128n64-v640-c2x16-s4-p1-h1-bf16-none", tmp_path, some[0])
    check("d576-m128n96-v576-c2x16-s4-p1-h4-f16-causal", tmp_path, *some)


def test_a_wide_output_is_repaired_on_the_emulator(tmp_path: Path) -> None:
    """Where hidden values spoil it: a warp has at most 256 columns of a row at once."""
    spoiled = next(case for case in CASES if case.spoiled)
    cases = [replace(spoiled, heads_q=1, head_dim_v=640)]
    check("d264-m128n64-v640-c5x32-s6-p1-h1-bf16-causal", tmp_path, *cases)


@pytest.mark.slow
def test_narrow_values_on_the_emulator(tmp_path: Path) -> None:
    cases = [replace(case, head_dim_v=312) for case in CASES]
    check("d512-m128n128-v320-c2x32-s4-p0-h1-f16-causal", tmp_path, *cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "d512-m128n128-v512-c2x32-s4-p1-h4-bf16-causal",
        "d448-m128n128-v448-c3x32-s3-p0-h4-f16-causal_lower_right",
        "d384-m128n128-v384-c3x64-s4-p1-h8-bf16-causal_lower_right",
        "d384-m128n128-v384-c2x32-s6-p1-h1-f16-none",
        "d288-m128n128-v320-c2x64-s4-p1-h1-bf16-causal",
        "d448-m128n96-v448-c4x48-s3-p1-h8-bf16-causal",
        "d576-m128n96-v576-c2x16-s4-p0-h1-bf16-causal_lower_right",
        "d640-m128n64-v640-c3x16-s4-p1-h8-bf16-causal",
        "d640-m128n64-v640-c5x32-s2-p1-h4-f16-causal_lower_right",
    ],
)
def test_more_are_right_on_the_emulator(text: str, tmp_path: Path) -> None:
    check(text, tmp_path, *CASES, *SHAPES)


@pytest.mark.parametrize("arch", [arch for arch in CUDA_ARCHS if arch != "sm_90a"])
def test_serves_no_other_architecture(arch: str) -> None:
    problem = Problem("bf16", 1, 8, 8, 4096, 4096, 512, 512, "causal")
    assert FAMILY.domain.refusal(problem, H200) is None
    assert FAMILY.domain.refusal(problem, cuda_limits(arch, 132)) is not None


def test_never_answers_unmeasured() -> None:
    problem = Problem("bf16", 1, 8, 8, 8192, 8192, 512, 512)
    assert not FAMILY.unmeasured(problem, H200)


def test_steps_of_128_keys_end_with_the_room_for_them() -> None:
    for head_dim, expected in ((384, {128}), (512, {96, 128}), (576, {64, 96}), (640, {64})):
        problem = Problem("bf16", 1, 8, 8, 8192, 8192, head_dim, head_dim)
        legal = FAMILY.legal(problem, H200)
        assert {variant.params.block_n for variant in legal} == expected
        assert len(legal) <= 8


@pytest.mark.parametrize("head_dim", range(264, 641, 8))
def test_has_defaults_for_every_head_dim(head_dim: int) -> None:
    for other in (264, 384, 512, 576, 640):
        for dims in ((head_dim, other), (other, head_dim)):
            problem = Problem("f16", 1, 8, 8, 8192, 8192, *dims, "causal")
            default = FAMILY.default_variant(problem, H200)
            assert default is not None
            assert default.refusal(problem, H200) is None, (default, dims)
            assert FAMILY.smem_bytes(default.params, problem) <= 232_448


@pytest.mark.nvcc
def test_defaults_compile_to_asynchronous_products(here: Settings) -> None:
    """Without the serialization that a build takes for an error. A causal mask from 512 columns on
    spills addresses and limits, of which a step of 2,000 cycles loads some ten again, and what ends
    a tile; others next to nothing."""
    wanted = []
    kinds = ((320, "none"), (384, "causal_lower_right"), (512, "causal"))
    for head_dim, mask in (*kinds, (576, "causal"), (640, "none"), (640, "causal")):
        problem = Problem("bf16", 1, 16, 16, 8192, 8192, head_dim, head_dim, mask)
        default = FAMILY.default_variant(problem, H200)
        assert default is not None
        wanted.append((default, "sm_90a"))
    for done in compiler.build(wanted, here, jobs=2):
        assert done.status == "ok", done.message
        assert done.usage is not None
        most = 280 if done.variant.params.columns_v <= 512 else 700
        assert done.usage.spill_bytes <= most, done.variant.slug
