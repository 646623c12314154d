"""Problems, buckets and shapes: pure values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofa.errors import AutofaError, DTypeError, UsageError
from autofa.problem import (
    MASKS,
    Problem,
    bucket_of,
    check,
    nearest_power_of_two,
    parse_dtype,
    parse_shape,
    ragged_neighbour,
)

sizes = st.integers(1, 2**20)
problems = st.builds(
    lambda dtype, b, hkv, group, nq, nk, d, dv, mask: Problem(
        dtype, b, hkv * group, hkv, nq, nk, d, dv, mask, "cpu"
    ),
    st.sampled_from(("f32", "f16", "bf16")),
    sizes,
    st.integers(1, 512),
    st.integers(1, 64),
    sizes,
    sizes,
    st.integers(1, 1024),
    st.integers(1, 1024),
    st.sampled_from(MASKS),
)


@given(st.integers(1, 2**31 - 1))
def test_rounding_is_nearest_in_log_space(n: int) -> None:
    rounded = nearest_power_of_two(n)
    assert rounded & (rounded - 1) == 0
    distance = abs(math.log2(rounded) - math.log2(n))
    assert distance <= 0.5 + 1e-12


@given(st.integers(0, 2**31 - 2))
def test_rounding_is_monotone(n: int) -> None:
    assert nearest_power_of_two(n) <= nearest_power_of_two(n + 1)


def test_small_sizes_keep_their_own_buckets() -> None:
    assert [nearest_power_of_two(n) for n in (0, 1, 2, 3, 5, 6, 11, 12)] == [
        0, 1, 2, 4, 4, 8, 8, 16,
    ]  # fmt: skip


@given(problems)
def test_bucket_is_idempotent_and_keeps_what_is_exact(problem: Problem) -> None:
    bucket = bucket_of(problem)
    assert bucket_of(bucket.problem) == bucket
    assert bucket.heads_q % bucket.heads_kv == 0
    assert bucket.heads_q // bucket.heads_kv == problem.heads_q // problem.heads_kv
    exact = ("dtype", "head_dim", "head_dim_v", "mask", "device")
    assert all(getattr(bucket, name) == getattr(problem, name) for name in exact)


@given(problems)
def test_shape_text_round_trips(problem: Problem) -> None:
    parsed = parse_shape(
        problem.shape, dtype=problem.dtype, mask=problem.mask, device=problem.device
    )
    assert parsed == problem


@pytest.mark.parametrize(
    "text",
    ["", "1,8,1024", "1,8,1024,64,1", "1,8,0,64", "1,8,1024,-1", "1,8,x,64", "1/2,8,1024,64",
     "1,8/3,1024,64", "1,8,1024,64/", "1,8,99999999999,64", "1,8,1024,70000", "1;8;1024;64"],
)  # fmt: skip
def test_bad_shapes_say_what_was_got_and_what_to_do(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_shape(text)
    assert "got" in str(caught.value)
    assert "supported" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AutofaError)


def test_dtype_names() -> None:
    assert [parse_dtype(n) for n in ("f32", "torch.float32", "half", "BFloat16")] == [
        "f32", "f32", "f16", "bf16",
    ]  # fmt: skip
    with pytest.raises(DTypeError):
        parse_dtype("f64")


def test_flops_follow_the_field() -> None:
    dense = parse_shape("2,16,8192,64")
    assert dense.flops == 4 * 2 * 16 * 8192**2 * 64
    assert replace(dense, mask="causal").flops == dense.flops / 2
    assert dense.tflops(1.0) == pytest.approx(dense.flops / 1e9)


def test_check_refuses_unknown_names() -> None:
    good = parse_shape("1,8,1024,64")
    for bad in ({"mask": "left"}, {"device": "tpu"}, {"dtype": "f8"}):
        with pytest.raises(UsageError):
            check(replace(good, **bad))


@given(problems)
def test_ragged_neighbour_is_smaller_and_of_the_same_kind(problem: Problem) -> None:
    ragged = ragged_neighbour(problem)
    assert ragged.seqlen_q <= problem.seqlen_q
    assert (ragged.seqlen_q == ragged.seqlen_k) or (problem.seqlen_q != problem.seqlen_k)
    assert problem.seqlen_q <= 16 or ragged.seqlen_q % 16
