"""mma.split_q, and of the vocabulary that the mma families share what their common tests leave out:
deep pipelines, sums in f16, and masks with odd strides and numbers."""

from __future__ import annotations

import math
from pathlib import Path

import cuda_variants
import pytest
import torch
from cuda_variants import CASES

from autofa.kernels.families.split_q import FAMILY as SPLIT_Q
from autofa.kernels.family import Variant
from autofa.runtime import abi


def variant_of(text: str) -> Variant:
    found = SPLIT_Q.parse(f"mma.split_q-{text}")
    assert found is not None
    return found


@pytest.mark.parametrize(
    "text",
    [
        "d64-m64n32-w4-s3-f16-f16-causal_lower_right",  # fewer and more tiles than stages
        "d40-m128n32-w8-s1-f32-bf16-causal",  # more threads than a panel has chunks
    ],
)
def test_right_on_the_emulator(text: str, tmp_path: Path) -> None:
    variant = variant_of(text)
    library = cuda_variants.emulated(variant, tmp_path)
    for case in CASES:
        cuda_variants.check(library, variant, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["d256-m64n32-w4-s2-f32-f16-none", "d200-m128n32-w8-s1-f32-f16-bool"]
)
def test_right_at_large_head_dims_on_the_emulator(text: str, tmp_path: Path) -> None:
    variant = variant_of(text)
    library = cuda_variants.emulated(variant, tmp_path)
    for case in CASES:
        cuda_variants.check(library, variant, case)


def test_masks_of_any_strides_and_numbers(tmp_path: Path) -> None:
    """A transposed mask; -inf hides NaN keys; the lowest finite number hides nothing of a row that
    has nothing else."""
    library = cuda_variants.emulated(variant_of("d16-m64n32-w4-s1-f32-f16-additive"), tmp_path)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 70, 16).half()
    k[..., 3, :] = math.nan
    attn_mask = torch.randn(1, 1, 70, 70).mT
    attn_mask[..., 3] = -math.inf
    attn_mask[:, :, 7, 4:] = torch.finfo(torch.float32).min
    attn_mask[:, :, 7, :4] = -math.inf
    out = torch.full_like(q, math.nan)

    code = cuda_variants.launch(library, "additive", (q, k, v, out), attn_mask=attn_mask)

    assert code == abi.OK
    want, _ = cuda_variants.reference(q, k, v, "additive", 0.125, attn_mask)
    want[:, :, 7] = v[:, :, 4:].double().mean(2)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-3)
