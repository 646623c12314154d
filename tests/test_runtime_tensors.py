"""What is accepted, what is refused and how, and what problem a call is."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from runtime_variants import require_runtime
from torch.nn.functional import scaled_dot_product_attention as sdpa

from autofa.errors import AutofaError, DeviceError, DTypeError, UsageError
from autofa.problem import Problem, parse_shape
from autofa.runtime import backends, extension
from autofa.runtime.tensors import make_inputs, problem_of, sdpa_only, validate

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


@pytest.fixture(autouse=True)
def clean_table() -> Iterator[None]:
    require_runtime()
    extension.set_miss(None)
    extension.table_clear()
    yield
    extension.table_clear()


def fwd(*arguments: object, **options: object) -> torch.Tensor:
    return torch.ops.autofa.fwd.default(*arguments, **options)


def zeros(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


Q, K, V = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)

# name, the shapes or tensors of q, k, v, the options, the error, a piece of its text
BAD = [
    ("dtypes", (zeros(*Q), zeros(*K, dtype=BF16), zeros(*V)), {}, DTypeError, "key bfloat16"),
    ("ints", tuple(zeros(*s, dtype=torch.int32) for s in (Q, K, V)), {}, DTypeError, "int32"),
    ("bools", tuple(zeros(*s, dtype=torch.bool) for s in (Q, K, V)), {}, DTypeError, "'bool'"),
    (
        "complex",
        tuple(zeros(*s, dtype=torch.complex64) for s in (Q, K, V)),
        {},
        DTypeError,
        "complex64",
    ),
    ("rank", ((8,), (7, 8), (7, 8)), {}, UsageError, "query (8,)"),
    ("head dims", (Q, (2, 4, 7, 16), V), {}, UsageError, "(2, 4, 7, 16)"),
    (
        "a value that is longer",
        ((1, 1, 3, 8), (1, 1, 5, 8), (1, 1, 6, 8)),
        {},
        UsageError,
        "length",
    ),
    (
        "a value far longer",
        (
            torch.zeros(1, 1, 1, 8),
            torch.zeros(1, 1, 1, 8),
            torch.zeros(1).expand(1, 1, 4_000_000, 8),
        ),
        {},
        UsageError,
        "4000000",
    ),
    ("batches", (Q, (3, 4, 7, 8), (3, 4, 7, 8)), {}, UsageError, "leading dims"),
    ("heads without the flag", (Q, (2, 2, 7, 8), (2, 2, 7, 8)), {}, UsageError, "enable_gqa=True"),
    (
        "heads that do not divide",
        (Q, (2, 3, 7, 8), (2, 3, 7, 8)),
        {"enable_gqa": True},
        UsageError,
        "multiple",
    ),
    (
        "more key heads than query heads",
        (Q, (2, 8, 7, 8), (2, 8, 7, 8)),
        {"enable_gqa": True},
        UsageError,
        "multiple",
    ),
    ("no key heads", (Q, (2, 0, 7, 8), (2, 0, 7, 8)), {"enable_gqa": True}, UsageError, "multiple"),
    ("a mask of rank 1", (Q, K, V), {"attn_mask": torch.zeros(7)}, UsageError, "attn_mask"),
    (
        "a mask without heads",
        (Q, K, V),
        {"attn_mask": torch.zeros(2, 5, 7)},
        UsageError,
        "(2, 5, 7)",
    ),
    ("a mask that is too long", (Q, K, V), {"attn_mask": torch.zeros(5, 8)}, UsageError, "(5, 8)"),
    ("a mask of ints", (Q, K, V), {"attn_mask": torch.zeros(5, 7).int()}, DTypeError, "int32"),
    ("a mask of bytes", (Q, K, V), {"attn_mask": torch.zeros(5, 7).byte()}, DTypeError, "uint8"),
    ("a mask of f64", (Q, K, V), {"attn_mask": torch.zeros(5, 7).double()}, DTypeError, "float64"),
]


@pytest.mark.parametrize(
    ("tensors", "options", "error", "text"), [c[1:] for c in BAD], ids=[c[0] for c in BAD]
)
def test_what_does_not_fit_is_refused_twice(
    tensors: tuple[object, ...], options: dict[str, object], error: type[AutofaError], text: str
) -> None:
    q, k, v = (t if isinstance(t, torch.Tensor) else zeros(*t) for t in tensors)
    with pytest.raises(error) as caught:
        validate(q, k, v, **options)
    message = str(caught.value)
    assert text in message
    assert message.count(";") == 2, "got; supported; what to do"
    # The operator, called directly, refuses it before any kernel runs.
    before = extension.counters()
    with pytest.raises(RuntimeError, match="supported"):
        fwd(q, k, v, **options)
    assert extension.counters() == before


def test_devices_must_agree() -> None:
    q, far = zeros(*Q), torch.zeros(K, device="meta")
    with pytest.raises(DeviceError, match="cpu, meta, cpu"):
        validate(q, far, zeros(*V))


GOOD = [
    ("plain", (Q, K, V), {}, None),
    ("other head dim of value", (Q, K, (2, 4, 7, 3)), {}, None),
    ("grouped", (Q, (2, 2, 7, 8), (2, 2, 7, 8)), {"enable_gqa": True}, None),
    ("one key head", (Q, (2, 1, 7, 8), (2, 1, 7, 8)), {"enable_gqa": True}, None),
    ("one key head without the flag", (Q, (2, 1, 7, 8), (2, 1, 7, 8)), {}, "broadcast"),
    ("one key batch", (Q, (1, 4, 7, 8), (1, 4, 7, 8)), {}, "broadcast"),
    ("one query batch", ((1, 4, 5, 8), K, V), {}, "broadcast"),
    (
        "other heads of value",
        ((2, 4, 5, 8), (2, 2, 7, 8), (2, 1, 7, 8)),
        {"enable_gqa": True},
        "broad",
    ),
    ("rank 3", ((4, 5, 8), (4, 7, 8), (4, 7, 8)), {}, None),
    ("rank 2", ((5, 8), (7, 8), (7, 8)), {}, "rank"),
    ("rank 5", ((3, *Q), (3, *K), (3, *V)), {}, "rank"),
    ("mixed ranks", (Q, (4, 7, 8), (4, 7, 8)), {}, "rank"),
    ("f64", tuple(zeros(*s, dtype=F64) for s in (Q, K, V)), {}, "dtype float64"),
    ("mask", (Q, K, V), {"attn_mask": torch.zeros(1, 4, 1, 7)}, None),
    (
        "mask with causal",
        (Q, K, V),
        {"attn_mask": torch.zeros(5, 7), "is_causal": True},
        "together",
    ),
    (
        "columns that are not dense",
        (zeros(2, 4, 8, 5).mT, K, V),
        {},
        "stride",
    ),
    ("no head dim", ((2, 4, 5, 0), (2, 4, 7, 0), (2, 4, 7, 3)), {}, "size 0"),
]


@pytest.mark.parametrize(
    ("tensors", "options", "only"), [c[1:] for c in GOOD], ids=[c[0] for c in GOOD]
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_sdpa_serves_is_served(
    tensors: tuple[object, ...], options: dict[str, object], only: str | None, dtype: torch.dtype
) -> None:
    q, k, v = (torch.randn(t) if isinstance(t, tuple) else t for t in tensors)
    if q.dtype == F32:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    validate(q, k, v, **options)
    asked = []
    extension.set_miss(lambda key: asked.append(key) or -1)
    out = fwd(q, k, v, **options)
    reason = sdpa_only(q, k, v, **options)
    assert bool(asked) == (reason is None)
    assert (only is None) == (reason is None)
    if only is not None:
        assert only in reason
    torch.testing.assert_close(out, sdpa(q, k, v, **options))
    # The strides follow the query where it has the output's rank.
    if q.dim() == out.dim() and q.shape == out.shape and only != "stride":
        assert out.stride() == torch.empty_like(q).stride()


@pytest.mark.parametrize("rows", [("q", "k"), ("k", "q")])
def test_a_mask_and_is_causal_mean_both(rows: tuple[str, str]) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 3, 5 if r == "q" else 7, 8) for r in rows)
    shape = (q.shape[-2], k.shape[-2])
    triangle = torch.ones(shape, dtype=torch.bool).tril()
    holes = torch.rand(shape) > 0.4
    additive = torch.randn(shape)
    for mask, both in (
        (holes, holes & triangle),
        (additive, additive.masked_fill(~triangle, -torch.inf)),
        (additive[:1], additive[:1].expand(shape).masked_fill(~triangle, -torch.inf)),
    ):
        torch.testing.assert_close(fwd(q, k, k, mask, True), sdpa(q, k, k, both))


@pytest.mark.parametrize(("n_q", "n_k"), [(3, 5), (5, 3), (1, 9), (4, 4)])
def test_the_lower_right_corner(n_q: int, n_k: int) -> None:
    q, k = torch.randn(1, 2, n_q, 8), torch.randn(1, 2, n_k, 8)
    mask = torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q)
    out = fwd(q, k, k, is_causal=True, lower_right=True)
    torch.testing.assert_close(out, sdpa(q, k, k, mask))
    flash = extension.add_vendor("torch.flash")
    extension.set_miss(lambda key: flash)
    torch.testing.assert_close(fwd(q, k, k, is_causal=True, lower_right=True), out)


EMPTY = [
    ((0, 2, 3, 4), (0, 2, 5, 4), (0, 2, 5, 4)),
    ((2, 0, 3, 4), (2, 0, 5, 4), (2, 0, 5, 4)),
    ((2, 2, 0, 4), (2, 2, 5, 4), (2, 2, 5, 4)),
    ((2, 2, 3, 4), (2, 2, 0, 4), (2, 2, 0, 4)),
    ((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 0)),
    ((2, 2, 3, 0), (2, 2, 5, 0), (2, 2, 5, 0)),
    ((0, 3, 4), (0, 5, 4), (0, 5, 4)),
]


@pytest.mark.parametrize("shapes", EMPTY, ids=str)
@pytest.mark.parametrize("dtype", [F32, F16])
def test_nothing_to_compute(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    q, k, v = (torch.ones(s, dtype=dtype) for s in shapes)
    asked = []
    extension.set_miss(lambda key: asked.append(key) or -1)
    before = extension.counters()
    out = fwd(q, k, v, is_causal=True)
    assert not asked
    assert extension.counters() == before
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert out.dtype == dtype
    assert (out == 0).all()
    torch.testing.assert_close(out, sdpa(q, k, v))


def test_a_head_dim_of_zero_averages() -> None:
    q, k, v = zeros(1, 2, 3, 0), zeros(1, 2, 5, 0), torch.randn(1, 2, 5, 4)
    torch.testing.assert_close(fwd(q, k, v), v.mean(-2, keepdim=True).expand(1, 2, 3, 4))


def test_problems() -> None:
    q, k, v = zeros(2, 8, 5, 64, dtype=BF16), zeros(2, 2, 7, 64), zeros(2, 2, 7, 32)
    expected = Problem("bf16", 2, 8, 2, 5, 7, 64, 32, "none", "cpu")
    assert problem_of(q, k, v, enable_gqa=True) == expected
    masks = (
        ({"is_causal": True}, "causal"),
        ({"is_causal": True, "lower_right": True}, "causal_lower_right"),
        ({"attn_mask": torch.ones(5, 7, dtype=torch.bool)}, "bool"),
        ({"attn_mask": torch.ones(5, 7)}, "additive"),
    )
    for options, mask in masks:
        assert problem_of(q, k, v, enable_gqa=True, **options).mask == mask
    assert problem_of(q, q, q, is_causal=True, lower_right=True).mask == "causal"
    assert problem_of(zeros(3, 5, 8), zeros(3, 7, 8), zeros(3, 7, 8)).shape == "1,3,5/7,8"
    assert problem_of(zeros(5, 8), zeros(7, 8), zeros(7, 8)).shape == "1,1,5/7,8"
    assert problem_of(zeros(2, 3, 4, 5, 8), zeros(4, 5, 8), zeros(4, 5, 8)).shape == "6,4,5,8"
    with pytest.raises(DTypeError, match="float64"):
        problem_of(*(zeros(*s, dtype=F64) for s in (Q, K, V)))


def test_inputs_are_those_of_the_problem() -> None:
    problem = parse_shape("2,6/3,5/9,16/8", dtype="f16", device="cpu")
    for layout in ("bhnd", "bnhd"):
        q, k, v = make_inputs(problem, "cpu", 3, layout=layout)
        assert problem_of(q, k, v, enable_gqa=True) == problem
        assert q.transpose(1, 2).is_contiguous() == (layout == "bnhd")
        again = make_inputs(problem, "cpu", 3, layout=layout)
        assert all(torch.equal(a, b) for a, b in zip((q, k, v), again, strict=True))
        assert not torch.equal(q, make_inputs(problem, "cpu", 4, layout=layout)[0])
    many = make_inputs(parse_shape("1,1,4096,64", device="cpu"), "cpu", 0)[0].float()
    assert abs(float(many.mean())) < 0.01
    assert math.isclose(float(many.std()), 1, abs_tol=0.01)
    with pytest.raises(UsageError, match="bhnd, bnhd"):
        make_inputs(problem, "cpu", 0, layout="nope")


def test_log_sums_where_every_score_is_lost_in_the_bias() -> None:
    """There the efficient backend gives 0."""
    lowest = torch.finfo(torch.bfloat16).min
    bias = torch.tensor([[lowest, lowest], [lowest, 1.0], [-math.inf, -math.inf]]).bfloat16()
    found = backends._ours(torch.tensor([[[0.0, 2.0, 3.0]]]), bias[None, None])
    assert found.tolist() == [[[lowest, 2.0, -math.inf]]]
