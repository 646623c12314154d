"""The float64 reference and its inputs, against plain SDPA in float64 and by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from autofa.bench.inputs import Frame, make_inputs
from autofa.bench.protocol import Case
from autofa.bench.reference import attention, sample_rows
from autofa.problem import MASKS, Problem

CPU = torch.device("cpu")


def problem(mask: str = "none", dtype: str = "f32", **sizes: int) -> Problem:
    given = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 33, "seqlen_k": 49}
    given |= {"head_dim": 24, "head_dim_v": 16} | sizes
    return Problem(dtype, **given, mask=mask, device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("mask", MASKS)
def test_equals_sdpa_in_float64(mask: str, layout: str, guarded: bool) -> None:
    inputs = make_inputs(Case("", problem(mask), layout=layout, guarded=guarded), CPU)
    arguments = inputs.sdpa_arguments()
    if isinstance(arguments.get("attn_mask"), torch.Tensor) and mask == "additive":
        arguments["attn_mask"] = inputs.attn_mask.double()  # type: ignore[union-attr]
    query, key, value = (t.double() for t in (inputs.query, inputs.key, inputs.value))
    expected = F.scaled_dot_product_attention(query, key, value, **arguments)  # type: ignore[arg-type]
    found = attention(inputs)
    assert found.rows.tolist() == list(range(33))
    torch.testing.assert_close(found.out, expected, rtol=1e-10, atol=1e-12)
    assert torch.isfinite(found.lse).all()


def test_rows_with_nothing_to_attend_to_are_zero() -> None:
    case = Case("", problem("causal_lower_right", seqlen_q=9, seqlen_k=4), guarded=False)
    found = attention(make_inputs(case, CPU))
    assert (found.out[:, :, :5] == 0).all()
    assert (found.lse[:, :, :5] == -math.inf).all()
    assert (found.scale[:, :, :5] == 0).all()
    assert found.out[:, :, 5:].abs().min() > 0


def test_lse_is_the_natural_logarithm() -> None:
    inputs = make_inputs(Case("", problem(heads_q=2), guarded=False), CPU)
    scores = inputs.query.double() @ inputs.key.double().mT / math.sqrt(24)
    torch.testing.assert_close(attention(inputs).lse, scores.logsumexp(-1))


def test_layouts_and_guards_do_not_change_the_values() -> None:
    plain = make_inputs(Case("", problem(), guarded=False), CPU)
    odd = make_inputs(Case("", problem(), layout="bnhd", guarded=True), CPU)
    assert torch.equal(plain.query, odd.query)
    assert torch.equal(plain.value, odd.value)
    assert odd.query.stride(1) < odd.query.stride(2)


def test_big_problems_are_sampled_at_their_edges() -> None:
    big = problem(seqlen_q=20000, seqlen_k=30000, head_dim=64, head_dim_v=64)
    rows = sample_rows(big)
    assert 16 <= len(rows) < 100
    assert {0, 63, 64, 127, 128, 19999, 19999 - 19999 % 128} <= set(rows)
    assert rows == sorted(set(rows))


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_a_frame_finds_every_write_outside_and_none_inside(layout: str) -> None:
    frame = Frame((2, 3, 5, 8), layout, torch.float16, CPU)
    assert frame.view.data_ptr() % 256 == 0
    assert bool(frame.untouched().all())
    frame.view.fill_(1.0)
    assert frame.damage() is None
    assert not bool(frame.untouched().any())
    strides = frame.view.stride()
    whole = frame.view.as_strided((6,), (1,), frame.view.storage_offset() + 7)
    for offset in (8, 5 * strides[2], -1, 2 * strides[0] + 100):
        target = frame.view.as_strided((1,), (1,), frame.view.storage_offset() + offset)
        before = target.clone()
        target.fill_(0.0)
        assert frame.damage() is not None, offset
        target.copy_(before)
    assert frame.damage() is None
    before_sum = frame.checksum()
    whole[0] = 2.0
    assert frame.damage() is None
    assert frame.checksum() != before_sum
