"""Every kernel on every kind of shape: tails, head dims, groups, ranks, empty and very many."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from conformance import (
    ATTENTION,
    Subject,
    attend,
    check,
    check_gradients,
    dtypes_of,
    each_device,
    each_kernel,
    fresh,  # noqa: F401
    inputs,
    randn,
)

import autofa
from autofa.bench.exact import Call, Truth
from autofa.kernels import REGISTRY
from autofa.problem import Problem
from autofa.runtime import devices, extension

pytestmark = pytest.mark.usefixtures("fresh")

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 62, 63, 65, 127, 129, 255, 257)
HEAD_DIMS = (1, 3, 8, 20, 40, 72, 80, 96, 160, 256, 264, 512)


def _tails(kernel: Subject, head_dim: int, causal: bool, step: int) -> None:
    rng = random.Random(f"{head_dim} {causal}")
    pairs = list(itertools.product(LENGTHS, LENGTHS))
    rng.shuffle(pairs)
    for nq, nk in pairs[::step]:
        dtype = rng.choice(dtypes_of(kernel))
        shape = (1, 2, nk, head_dim)
        q, k, v = inputs(kernel.device, (1, 2, nq, head_dim), shape, dtype=dtype)
        check(kernel, Call(q, k, v, is_causal=causal))


@each_kernel
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_that_fill_no_tile(kernel: Subject, head_dim: int, causal: bool) -> None:
    _tails(kernel, head_dim, causal, step=12)


@pytest.mark.slow
@each_kernel
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_all_pairs_of_lengths(kernel: Subject, head_dim: int, causal: bool) -> None:
    _tails(kernel, head_dim, causal, step=1)


@each_kernel
def test_usual_shapes_are_served(kernel: Subject) -> None:
    """By every family; on a GPU by those of which a default is built."""
    if kernel.family is None:
        pytest.skip("of another library, or whichever wins")
    served, legal = [], False
    for dtype, width, nq in itertools.product(dtypes_of(kernel), (64, 128, 320, 512), (1, 256)):
        mask = "causal" if nq > 1 else "none"
        problem = Problem(dtype, 1, 8, 8, nq, 256, width, width, mask, kernel.device)
        legal |= bool(kernel.family.legal(problem, devices.limits(kernel.device)))
        tensors = inputs(kernel.device, (1, 8, nq, width), (1, 8, 256, width), dtype=dtype)
        served.append(check(kernel, Call(*tensors, is_causal=nq > 1)))
    if kernel.device == "cuda" and not any(served):
        pytest.skip("none of its defaults for these is in the cache of libraries")
    if not legal:
        pytest.skip("not for this processor")
    assert any(served)


@each_kernel
def test_padding_would_dominate_negative_scores(kernel: Subject) -> None:
    """All logits are below -50: a padded key with a logit of 0 would take all the weight."""
    for nq, nk, head_dim in itertools.product((1, 17, 65), (1, 31, 129), (8, 64, 72)):
        for dtype in dtypes_of(kernel):
            q = randn(1, 2, 1, head_dim, device=kernel.device, dtype=dtype)
            q = (q / q.float().norm(dim=-1, keepdim=True) * head_dim**0.5 * 4).to(q.dtype)
            k = -q.expand(1, 2, nk, head_dim) * (
                1 + 0.01 * randn(1, 2, nk, 1, device=kernel.device)
            )
            v = randn(1, 2, nk, head_dim, device=kernel.device, dtype=dtype)
            check(kernel, Call(q.expand(1, 2, nq, head_dim).clone(), k.to(q.dtype), v, scale=4.0))


@each_kernel
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_any_head_dims(kernel: Subject, head_dim: int) -> None:
    """The default scale is that of the head dim as it is, not as some kernel pads it."""
    for head_dim_v, dtype in itertools.product((head_dim, 16, 1), dtypes_of(kernel)):
        for nq in (3, 33):
            query, key = (1, 2, nq, head_dim), (1, 2, 50, head_dim)
            call = Call(*inputs(kernel.device, query, key, head_dim_v, dtype))
            check(kernel, call)


@each_kernel
@pytest.mark.parametrize("groups", [(8, 8), (8, 2), (6, 1), (32, 1), (3, 3)])
def test_query_heads_share_key_heads_in_order(kernel: Subject, groups: tuple[int, int]) -> None:
    heads_q, heads_kv = groups
    for dtype, nq in itertools.product(dtypes_of(kernel), (1, 19)):
        shape = (2, heads_kv, 40, 64)
        q, k, v = inputs(kernel.device, (2, heads_q, nq, 64), shape, dtype=dtype)
        v = v + 10 * torch.arange(heads_kv, device=v.device)[:, None, None].to(v.dtype)
        call = Call(q, k, v, enable_gqa=True)
        check(kernel, call)
        if heads_q > heads_kv > 1:
            tiled = v.repeat(1, heads_q // heads_kv, 1, 1)
            assert Truth(Call(q, k.repeat_interleave(heads_q // heads_kv, 1), tiled)).wrong(
                attend(call)
            )


@each_kernel
@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (1, 9), (6, 6), (40, 70), (70, 40)])
@pytest.mark.parametrize("lower_right", [False, True])
def test_the_corner_of_a_causal_mask(
    kernel: Subject, lengths: tuple[int, int], lower_right: bool
) -> None:
    nq, nk = lengths
    for dtype in dtypes_of(kernel):
        call = Call(
            *inputs(kernel.device, (1, 2, nq, 64), (1, 2, nk, 64), dtype=dtype),
            is_causal=True,
            lower_right=lower_right,
        )
        check(kernel, call)
        if not lower_right:
            assert torch.equal(Truth(call).out[:, :, 0], call.value[:, :, 0].double())


@each_kernel
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 3, 2), (1, 2, 1, 3)], ids=str)
def test_any_rank(kernel: Subject, lead: tuple[int, ...]) -> None:
    for dtype in dtypes_of(kernel):
        check(kernel, Call(*inputs(kernel.device, (*lead, 9, 64), dtype=dtype), is_causal=True))


BROADCAST = [
    ((2, 3), (1, 3), (2, 3)),
    ((2, 3), (2, 1), (2, 1)),
    ((1, 3), (2, 3), (2, 3)),
    ((2, 3), (3,), ()),
    ((), (2,), (3, 1)),
    ((2, 1, 3), (3,), (1, 2, 1)),
]


@each_kernel
@pytest.mark.parametrize("leads", BROADCAST, ids=str)
def test_sizes_of_one_broadcast(kernel: Subject, leads: tuple[tuple[int, ...], ...]) -> None:
    q, k, v = (randn(*x, 7, 64, device=kernel.device, seed=i) for i, x in enumerate(leads))
    check(kernel, Call(q, k, v))
    lead = torch.broadcast_shapes(*leads)
    mask = randn(*lead, 7, 7, device=kernel.device) > 0
    check(kernel, Call(q, k, v, mask))


EMPTY = (
    {"b": 0}, {"h": 0}, {"nq": 0}, {"d": 0}, {"dv": 0}, {"nk": 0},
    {"b": 0, "nq": 0}, {"d": 0, "dv": 0},
)  # fmt: skip


@each_kernel
@pytest.mark.parametrize("empty", EMPTY, ids=str)
def test_empty_tensors(kernel: Subject, empty: dict[str, int]) -> None:
    size = {"b": 2, "h": 3, "nq": 4, "nk": 5, "d": 8, "dv": 8, **empty}
    q, k, v = inputs(
        kernel.device,
        (size["b"], size["h"], size["nq"], size["d"]),
        (size["b"], size["h"], size["nk"], size["d"]),
        size["dv"],
    )
    asked = extension.counters()["miss"]
    for causal in (False, True):
        check(kernel, Call(q, k, v, is_causal=causal))
    if "d" not in empty and kernel.name == ATTENTION:
        assert extension.counters()["miss"] == asked, "something was looked up"
    for gqa in (False, True):
        check_gradients(kernel, Call(q, k, v, enable_gqa=gqa))


@each_device
@pytest.mark.parametrize(
    ("lead", "sizes", "shape"),
    [
        ((1,), ((1,), (1, 1), (1, 1)), (1, 1, 0, 8)),
        ((2,), ((2,), (3, 2), (1, 2)), (3, 2, 0, 8)),
    ],
)
def test_what_is_empty_has_the_broadcast_shape(
    device: str, lead: object, sizes: tuple[tuple[int, ...], ...], shape: tuple[int, ...]
) -> None:
    """torch gives the query's leading sizes there."""
    q, k, v = (randn(*x, 0, 8, device=device) for x in sizes)
    for call in (Call(q, k, v), Call(q.requires_grad_(), k, v)):
        assert attend(call).shape == shape


@each_device
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((65535, 1, 4, 8), "f16"), ((65536, 1, 4, 8), "f32"), ((1, 65536, 4, 8), "f16")],
    ids=str,
)
def test_very_many_heads(device: str, shape: tuple[int, ...], dtype: str) -> None:
    subjects = [Subject(ATTENTION, device)]
    subjects += [Subject(f.name, device) for f in REGISTRY.families if f.domain.device == device]
    for kernel in subjects:
        if dtype in dtypes_of(kernel) or kernel.name == ATTENTION:
            check(kernel, Call(*inputs(device, shape, dtype=dtype)))
    if dtype == "f32":
        check_gradients(subjects[0], Call(*inputs(device, shape, dtype=dtype)))


@each_kernel
def test_very_many_queries(kernel: Subject) -> None:
    rows = 64 * 65535 + 1 if kernel.device == "cuda" else 64 * 1024 + 1
    dtype = dtypes_of(kernel)[-1]
    call = Call(*inputs(kernel.device, (1, 1, rows, 16), (1, 1, 16, 16), dtype=dtype))
    check(kernel, call)


def _tiles(step: int) -> None:
    """Legal variants of every CPU family in every dtype, on one ragged problem each."""
    limits = devices.limits("cpu")
    for family in (f for f in REGISTRY.families if f.domain.device == "cpu"):
        for dtype in family.domain.dtypes:
            for nq, nk in ((67, 131), (5, 1031)):
                problem = Problem(dtype, 1, 2, 2, nq, nk, 72, 72, "causal_lower_right", "cpu")
                call = Call(
                    *inputs("cpu", (1, 2, nq, 72), (1, 2, nk, 72), dtype=dtype),
                    is_causal=True,
                    lower_right=True,
                )
                truth = Truth(call)
                for variant in family.legal(problem, limits)[::step]:
                    with autofa.force_kernel(variant.slug):
                        wrong = truth.wrong(attend(call))
                    assert wrong is None, f"{variant.slug}: {wrong}"


def test_some_tiles_of_each_family() -> None:
    """The slow test has all of them."""
    _tiles(step=24)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_tile_of_each_family() -> None:
    _tiles(step=1)
