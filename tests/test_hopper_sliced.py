"""hopper.sliced: what the tests of all CUDA families leave out. Slices that are filled up, tiles of
every number of steps, other value head dims, where its domain ends, and what ptxas makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cuda_variants
import pytest
from cuda_variants import CASES, Case

from autofa import compiler
from autofa.device import CUDA_ARCHS, cuda_limits
from autofa.kernels.families.hopper_sliced import FAMILY
from autofa.problem import Problem
from autofa.settings import Settings

H200 = cuda_limits("sm_90a", 132)
# What the emulator's one cluster makes of it: tiles one after the other, of one step, of two, of
# more, and of a number that differs between the warpgroups.
SHAPES = (
    Case("many tiles", 3, 1, 330, 330, layout="bnhd", batch=2),
    Case("rows before the keys", 2, 1, 420, 130),
    Case("a diagonal off the steps", 1, 1, 200, 300),
    Case("rescaled in each step", 1, 1, 150, 460, growing=True),
)


def check(text: str, folder: Path, *cases: Case) -> None:
    cuda_variants.check_emulated(cuda_variants.named(FAMILY, text, H200), folder, *cases)


def test_slices_on_the_emulator(tmp_path: Path) -> None:
    cases = [case for case in (*CASES, *SHAPES) if case.name in ("ragged", "many tiles")]
    check("d520-m128n64-v640-c3-s4-e1-h4-bf16-causal", tmp_path, *cases)


def test_slices_of_three_blocks_on_the_emulator(tmp_path: Path) -> None:
    cases = [case for case in (*CASES, *SHAPES) if case.name in ("ragged", "many tiles")]
    check("d520-m128n48-v576-c3-s6-e0-h4-f16-causal_lower_right", tmp_path, *cases)


def test_steps_of_96_keys_on_the_emulator(tmp_path: Path) -> None:
    cases = [case for case in (*CASES, *SHAPES) if case.name in ("ragged", "many tiles")]
    check("d520-m128n96-v576-c1-s8-e1-h4-bf16-causal", tmp_path, *cases)


@pytest.mark.parametrize(
    "text",
    ["d768-m128n64-v640-c3-s4-e0-h1-f16-none", "d768-m128n96-v576-c1-s8-e1-h1-bf16-none"],
)
def test_value_head_dims_of_their_own_on_the_emulator(text: str, tmp_path: Path) -> None:
    most = int(text.split("-v")[1].split("-")[0])
    check(text, tmp_path, *(replace(CASES[2], head_dim_v=dim) for dim in (520, most)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "d1024-m128n64-v1024-c2-s5-e0-h4-bf16-causal_lower_right",
        "d1024-m128n64-v1024-c3-s3-e1-h1-f16-none",
        "d576-m128n64-v640-c2-s6-e0-h8-f16-causal",
        "d840-m128n64-v896-c2-s5-e1-h1-bf16-causal",
        "d640-m128n48-v672-c4-s4-e0-h1-bf16-none",
        "d768-m128n48-v768-c2-s4-e0-h8-bf16-causal",
        "d568-m128n48-v576-c3-s6-e1-h1-f16-none",
        "d696-m128n48-v768-c4-s4-e1-h4-f16-causal_lower_right",
        "d600-m128n96-v672-c1-s7-e0-h1-bf16-causal_lower_right",
        "d696-m128n96-v768-c1-s7-e0-h4-f16-causal",
        "d768-m128n96-v768-c1-s7-e1-h1-bf16-none",
    ],
)
def test_more_are_right_on_the_emulator(text: str, tmp_path: Path) -> None:
    check(text, tmp_path, *CASES, *SHAPES)


@pytest.mark.parametrize("arch", [arch for arch in CUDA_ARCHS if arch != "sm_90a"])
def test_serves_no_other_architecture(arch: str) -> None:
    problem = Problem("bf16", 1, 8, 8, 4096, 4096, 1024, 1024, "causal")
    assert FAMILY.domain.refusal(problem, H200) is None
    assert FAMILY.domain.refusal(problem, cuda_limits(arch, 132)) is not None


def test_never_answers_unmeasured() -> None:
    problem = Problem("bf16", 1, 8, 8, 8192, 8192, 1024, 1024)
    assert not FAMILY.unmeasured(problem, H200)


@pytest.mark.parametrize("head_dim", range(520, 1025, 24))
def test_has_defaults_for_every_head_dim(head_dim: int) -> None:
    for head_dim_v in (520, 1024, head_dim):
        problem = Problem("f16", 1, 8, 8, 8192, 8192, head_dim, head_dim_v, "causal")
        default = FAMILY.default_variant(problem, H200)
        assert default is not None
        assert default.refusal(problem, H200) is None, (default, head_dim_v)
        assert FAMILY.smem_bytes(default.params, problem) <= 232_448


@pytest.mark.nvcc
def test_defaults_compile_to_asynchronous_products(here: Settings) -> None:
    """Without the serialization that a build takes for an error. The largest spill what a tile
    needs once, and nothing that its steps need."""
    wanted = []
    kinds = ((576, "none"), (768, "none"), (768, "causal_lower_right"), (1024, "causal"))
    for head_dim, mask in kinds:
        problem = Problem("bf16", 1, 16, 16, 8192, 8192, head_dim, head_dim, mask)
        default = FAMILY.default_variant(problem, H200)
        assert default is not None
        wanted.append((default, "sm_90a"))
    for done in compiler.build(wanted, here, jobs=2):
        assert done.status == "ok", done.message
        assert done.usage is not None
        assert done.usage.spill_bytes <= 200, done.variant.slug
