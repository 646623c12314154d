"""hopper.split_q: what the tests of all CUDA families leave out. Chunks, sets of weights and value
head dims on the emulator; where its domain ends; what ptxas makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cuda_variants
import pytest
from cuda_variants import CASES, Case

from autofa import compiler
from autofa.device import CUDA_ARCHS, cuda_limits
from autofa.kernels.families.hopper_split_q import FAMILY
from autofa.problem import Problem
from autofa.settings import Settings

H200 = cuda_limits("sm_90a", 132)
# What the emulator's three SMs make of it: several tiles for a block, in groups of heads of which
# the last is not whole; warpgroups that need fewer keys than their neighbours, or have no rows.
MANY_TILES = Case("many tiles", 6, 2, 330, 330, layout="bnhd", batch=2)
BEFORE_THE_KEYS = Case("rows before the keys", 3, 1, 420, 130)
# More chunks than a ring has buffers, which a warpgroup without rows must let go turn by turn.
FEW_ROWS = Case("few rows", 2, 1, 40, 500)


def check(text: str, folder: Path, *cases: Case) -> None:
    cuda_variants.check_emulated(cuda_variants.named(FAMILY, text, H200), folder, *cases)


@pytest.mark.parametrize(
    "text",
    [
        "d64-m128n64-v64-c1-s12-w2-t0-h4-f16-causal_lower_right",
        "d64-m192n96-v64-c1-s12-w2-t1-h4-f16-causal_lower_right",
        "d72-m192n96-v96-c1-s6-w1-t0-h4-bf16-causal",
    ],
)
def test_persistent_blocks_on_the_emulator(text: str, tmp_path: Path) -> None:
    check(text, tmp_path, MANY_TILES, BEFORE_THE_KEYS)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_one_consumer_for_small_grids_on_the_emulator(mask: str, tmp_path: Path) -> None:
    problem = Problem("f16", 1, 4, 4, 512, 512, 48, 48, mask)
    variant = FAMILY.default_variant(problem, H200)
    assert variant is not None
    assert variant.params.block_m == 64
    cuda_variants.check_emulated(variant, tmp_path, MANY_TILES, BEFORE_THE_KEYS)


def test_value_head_dims_of_their_own_on_the_emulator(tmp_path: Path) -> None:
    cases = [replace(case, head_dim_v=24) for case in CASES if case.name in ("ragged", "no keys")]
    check("d136-m128n128-v32-c1-s3-w2-t0-h1-f16-none", tmp_path, *cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "d256-m128n64-v256-c2-s9-w2-t0-h4-bf16-causal_lower_right",
        "d256-m128n64-v256-c1-s4-w2-t1-h4-bf16-causal_lower_right",
        "d256-m128n80-v256-c1-s4-w1-t0-h1-f16-none",
        "d192-m128n96-v192-c2-s6-w2-t0-h4-f16-causal",
        "d128-m128n176-v128-c1-s4-w1-t0-h8-bf16-causal",
        "d128-m128n128-v128-c1-s6-w2-t1-h1-f16-none",
        "d64-m192n128-v64-c1-s12-w1-t1-h8-f16-causal",
        "d40-m192n96-v64-c1-s12-w2-t0-h1-bf16-none",
    ],
)
def test_more_are_right_on_the_emulator(text: str, tmp_path: Path) -> None:
    check(text, tmp_path, *CASES, MANY_TILES, BEFORE_THE_KEYS, FEW_ROWS)


@pytest.mark.parametrize("arch", [arch for arch in CUDA_ARCHS if arch != "sm_90a"])
def test_serves_no_other_architecture(arch: str) -> None:
    problem = Problem("bf16", 1, 8, 8, 4096, 4096, 128, 128, "causal")
    assert FAMILY.domain.refusal(problem, H200) is None
    assert FAMILY.domain.refusal(problem, cuda_limits(arch, 132)) is not None


def test_never_answers_unmeasured() -> None:
    problem = Problem("bf16", 1, 8, 8, 8192, 8192, 128, 128)
    assert not FAMILY.unmeasured(problem, H200)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_takes_problems_without_heads(mask: str) -> None:
    problem = Problem("bf16", 1, 0, 0, 512, 512, 64, 64, mask)
    default = FAMILY.default_variant(problem, H200)
    assert default is not None
    assert default in FAMILY.legal(problem, H200)


@pytest.mark.parametrize("mask", ["none", "causal", "causal_lower_right"])
@pytest.mark.parametrize("seqlen", [200, 1024, 2048, 8192])
def test_defaults_are_legal(seqlen: int, mask: str) -> None:
    """And three consumers are for grids of several waves."""
    for head_dim in range(8, 257, 8):
        for head_dim_v in {8, head_dim, 256}:
            problem = Problem("f16", 2, 16, 4, seqlen, seqlen, head_dim, head_dim_v, mask)
            default = FAMILY.default_variant(problem, H200)
            assert default is not None, problem
            assert default.refusal(problem, H200) is None, problem
            large = seqlen >= 2048 and max(head_dim, head_dim_v) <= 64
            assert (default.params.block_m == 192) == large, problem


def test_112_keys_are_for_wide_heads() -> None:
    def found(head_dim: int) -> set[object]:
        problem = Problem("bf16", 2, 16, 16, 8192, 8192, head_dim, head_dim)
        variants = FAMILY.legal(problem, H200)
        return {v.params.weight_sets for v in variants if v.params.block_n == 112}

    assert found(128) == set()
    assert 2 in found(192)


def test_refuses_other_value_head_dims_than_its_columns() -> None:
    variant = cuda_variants.named(FAMILY, "d64-m192n96-v64-c1-s12-w2-t0-h1-bf16-none", H200)
    equal = Problem("bf16", 1, 8, 8, 4096, 4096, 64, 64)
    assert variant.refusal(equal, H200) is None
    assert variant.refusal(replace(equal, head_dim_v=40), H200) is None
    assert "value columns" in (variant.refusal(replace(equal, head_dim_v=72), H200) or "")


@pytest.mark.nvcc
def test_defaults_compile_to_asynchronous_products(here: Settings) -> None:
    """Without spills but for those of a causal producer, once a tile, and without the serialization
    that a build takes for an error."""
    kinds = (
        (64, "none"),
        (64, "causal"),
        (128, "none"),
        (192, "none"),
        (192, "causal_lower_right"),
        (256, "none"),
        (256, "causal"),
    )
    wanted = []
    for head_dim, mask in kinds:
        problem = Problem("bf16", 1, 16, 16, 8192, 8192, head_dim, head_dim, mask)
        default = FAMILY.default_variant(problem, H200)
        assert default is not None
        wanted.append((default, "sm_90a"))
    for done in compiler.build(wanted, here, jobs=2):
        assert done.status == "ok", done.message
        assert done.usage is not None
        allowed = 0 if done.variant.mask == "none" else 88  # 48 stored, 40 read
        assert done.usage.spill_bytes <= allowed, done.variant.slug
