"""Every CPU family against a float64 reference, called through the C ABI alone.

Parametrised over the declarations: a family that is added is tested here without a line of its own.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import mmap
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpu_variants import (
    NO_THREADS,
    PARALLEL_FOR,
    Case,
    Library,
    assert_close,
    check,
    explicit_mask,
    families,
    qkv,
    reference,
    samples,
)
from torch.nn.functional import scaled_dot_product_attention

from autofa.problem import EXPLICIT_MASKS, MASKS
from autofa.runtime import abi

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257)
HEAD_DIMS = (1, 3, 8, 20, 32, 40, 64, 72, 80, 128, 160, 256)
MASK_DIMS = ("bhqk", "qk", "bk", "k", "q", "bq", "h", "hqk")
PROT_NONE = 0  # of mprotect(2)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The many small operations of the reference are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def load(session_cache: Path) -> Iterator[Callable[..., Library]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOFA_CACHE_DIR", str(session_cache))
        yield functools.cache(Library)


def each(*masks: str) -> pytest.MarkDecorator:
    """`library` and `mask` over all families, for the masks that a family has a variant of."""
    found = [
        pytest.param((variant, limits), mask, id=f"{variant.slug}-{mask}")
        for family in families()
        for variant, limits in samples(family)
        for mask in masks
        if mask in family.domain.masks and variant.mask in (None, mask)
    ]
    return pytest.mark.parametrize(("library", "mask"), found, indirect=["library"])


@pytest.fixture
def library(request: pytest.FixtureRequest, load: Callable[..., Library]) -> Library:
    return load(*request.param)


def ran(results: list[bool]) -> None:
    assert any(results), "it serves none of these cases"


@each(*MASKS)
def test_ragged_lengths(library: Library, mask: str) -> None:
    rng = random.Random(mask)
    pairs = [*zip(LENGTHS, LENGTHS, strict=True), *itertools.product(LENGTHS, LENGTHS)][::6]
    cases = [Case(nq, nk, rng.choice((8, 32, 33)), 16) for nq, nk in [*pairs, (1, 1500), (3, 777)]]
    ran([check(library, rng, case, mask) for case in cases])


@each(*MASKS)
def test_any_head_dims(library: Library, mask: str) -> None:
    rng = random.Random(mask)
    for d in HEAD_DIMS:
        dv = rng.choice(HEAD_DIMS)
        for case in (Case(70, 150, d, d), Case(33, 20, d, dv), Case(3, 150, d, dv)):
            check(library, rng, case, mask)


@each(*MASKS)
def test_grouped_heads_and_scales(library: Library, mask: str) -> None:
    rng = random.Random(mask)
    heads = ((4, 2), (6, 2), (5, 1), (16, 2))
    scales = (0.0, -0.5, 1e-30, 0.3)
    cases = [Case(nq, 90, hq=hq, hkv=hkv) for hq, hkv in heads for nq in (1, 7, 40)]
    cases += [Case(nq, 140, 32, 32, scale=scale) for scale in scales for nq in (2, 37)]
    ran([check(library, rng, case, mask) for case in cases])


@each(*EXPLICIT_MASKS)
def test_masks_of_any_broadcast_shape(library: Library, mask: str) -> None:
    rng = random.Random(mask)
    done = []
    for dims, dtype in itertools.product(MASK_DIMS, ("f32", "own")):
        for nq, nk in ((1, 300), (13, 77), (70, 150)):
            case = Case(nq, nk, 16, 32, 4, 2, mask_dims=dims, mask_dtype=dtype)
            done.append(check(library, rng, case, mask))
    ran(done)


@each("additive")
def test_the_lowest_finite_bias_hides_nothing_by_itself(library: Library, mask: str) -> None:
    """What many models write for "hidden": a row that has nothing else is averaged, as in torch."""
    rng = random.Random(11)
    case = Case(5, 40, 16, 16)
    tensors = qkv(library, rng, case)
    attn_mask = torch.zeros(2, 2, 5, 40)
    attn_mask[:, :, 1:] = torch.finfo(torch.float32).min
    attn_mask[:, :, 2, 7] = 0.0
    out = library.attend(tensors, mask=mask, attn_mask=attn_mask)
    doubles = [t.double() for t in (*tensors, attn_mask)]
    theirs = scaled_dot_product_attention(*doubles)
    magnitude = tensors[2].double().abs().amax(2, keepdim=True).expand(theirs.shape)
    assert_close(library, out, theirs, magnitude)


@each("none")
def test_large_logits_are_as_exact_as_sdpa(library: Library, mask: str) -> None:
    rng = random.Random(2)
    tensors = qkv(library, rng, Case(10, 300, 64, 64))
    for scale in (50.0, 300.0, 1e30):
        right, _, magnitude = reference(tensors, mask, scale)
        theirs = scaled_dot_product_attention(*tensors, scale=scale).double()
        ours = library.attend(tensors, scale=scale).double()
        allowed = 3 * (theirs - right).abs().max().item() + 1e-5
        assert_close(library, ours, right, magnitude, atol=allowed)


@each("none", "causal", "causal_lower_right")
def test_rows_with_nothing_to_attend_are_zero(library: Library, mask: str) -> None:
    rng = random.Random(3)
    for nq, nk in ((5, 0), (16, 3), (150, 40), (33, 1)):
        case = Case(nq, nk, 16, 32)
        if not library.serves(case, mask):
            continue
        tensors = qkv(library, rng, case)
        lse = torch.full(tensors[0].shape[:3], math.nan)
        out = library.attend(tensors, mask=mask, lse=lse)
        empty = nq if nk == 0 else nq - nk if mask == "causal_lower_right" else 0
        assert (out[:, :, :empty] == 0).all()
        assert (lse[:, :, :empty] == -math.inf).all()
        assert lse[:, :, empty:].isfinite().all()


@each("none")
def test_no_queries_or_no_batch_is_no_work(library: Library, mask: str) -> None:
    for shape in ((1, 2, 0, 32), (0, 2, 5, 32)):
        q = torch.empty(shape, dtype=library.torch_dtype)
        k = torch.empty((shape[0], 2, 4, 32), dtype=library.torch_dtype)
        assert library.attend((q, k, k), mask=mask).shape == shape


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@each("causal", "causal_lower_right", *EXPLICIT_MASKS)
def test_hidden_keys_never_contribute(library: Library, mask: str, poison: float) -> None:
    rng = random.Random(4)
    for nq, nk, first in (
        (4, 9, 6),
        (16, 1100, 1087),
        (40, 40, 21),
        (100, 160, 90),
        (90, 60, 47),
        (33, 64, 33),
    ):
        case = Case(nq, nk, 32, 32)
        if not library.serves(case, mask):
            continue
        q, k, v = qkv(library, rng, case)
        attn_mask = None
        unaware = first - (nk - nq if mask == "causal_lower_right" else 0)
        if mask in EXPLICIT_MASKS:
            unaware = nq - 1
            attn_mask = explicit_mask(library, rng, case, mask).clone()
            attn_mask[:, :, :unaware, first:] = False if mask == "bool" else -math.inf
        right, _, magnitude = reference((q, k, v), mask, None, attn_mask)
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, :, first:] = poison
        bad_v[:, :, first:] = poison
        out = library.attend((q, bad_k, bad_v), mask=mask, attn_mask=attn_mask)
        rows = slice(0, min(unaware, nq))  # queries that see none of them
        assert unaware > 0
        assert_close(library, out[:, :, rows], right[:, :, rows], magnitude[:, :, rows])


@each("none")
def test_a_nan_that_is_seen_comes_out(library: Library, mask: str) -> None:
    rng = random.Random(5)
    tensors = qkv(library, rng, Case(10, 40, 32, 32))
    assert library.attend(tensors, mask=mask, scale=math.nan).isnan().all()
    for place in tensors:
        before = place[0, 0, 0].clone()
        # All bits set is a NaN too, whose payload must not turn into an exponent.
        words = {2: torch.int16, 4: torch.int32}[place.element_size()]
        place[0, 0, 0] = torch.tensor([-1], dtype=words).view(place.dtype)
        assert library.attend(tensors, mask=mask)[0, 0, 0].isnan().all()
        place[0, 0, 0] = before


@each(*MASKS)
def test_same_bits_every_time(library: Library, mask: str) -> None:
    rng = random.Random(6)
    torch.set_num_threads(3)
    for case in (Case(150, 150, 64, 64), Case(3, 1300, 64, 64, 4, 2)):
        if not library.serves(case, mask):
            continue
        tensors = qkv(library, rng, case)
        attn_mask = explicit_mask(library, rng, case, mask) if mask in EXPLICIT_MASKS else None
        for threads in (1, 2, 3):
            first = library.attend(tensors, threads, mask=mask, attn_mask=attn_mask)
            for _ in range(3):
                again = library.attend(tensors, threads, mask=mask, attn_mask=attn_mask)
                assert torch.equal(again, first)


@each("none")
def test_threads_come_from_the_executor_alone(library: Library, mask: str) -> None:
    """Any executor will do, be it one that runs its parts backwards in the calling thread."""
    calls = []

    @PARALLEL_FOR
    def backwards(begin: int, end: int, grain: int, fn: Callable[..., None], arg: int) -> int:
        calls.append(end - begin)
        for i in reversed(range(begin, end)):
            fn(i, i + 1, arg)
        return 0

    rng = random.Random(7)
    for case in (Case(10, 2000, 64, 64), Case(300, 300, 64, 64)):
        if not library.serves(case, mask):
            continue
        tensors = qkv(library, rng, case)
        out = torch.empty((*tensors[0].shape[:3], case.dv), dtype=library.torch_dtype)
        assert library.call(library.params(tensors, out), backwards, 7) == abi.OK
        right, _, magnitude = reference(tensors)
        assert_close(library, out, right, magnitude)
    assert calls
    assert max(calls) <= 7


@pytest.fixture
def guarded() -> Callable[[torch.Tensor, bool], torch.Tensor]:
    """Copies a contiguous tensor to where touching what lies behind (or before) it is a fault."""
    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    kept: list[tuple[mmap.mmap, int]] = []

    def copy(source: torch.Tensor, at_end: bool) -> torch.Tensor:
        size = source.numel() * source.element_size()
        room = -(-size // page) * page
        memory = mmap.mmap(-1, room + 2 * page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        offset = page + (room - size if at_end else 0)
        moved = torch.frombuffer(
            memory, dtype=source.dtype, count=source.numel(), offset=offset
        ).view(source.shape)
        moved.copy_(source)
        for guard in (address, address + page + room):
            assert libc.mprotect(ctypes.c_void_p(guard), page, PROT_NONE) == 0
        kept.append((memory, address))
        return moved

    return copy


@pytest.mark.parametrize("at_end", [True, False])
@each(*MASKS)
def test_nothing_outside_the_tensors_is_touched(
    library: Library,
    mask: str,
    guarded: Callable[[torch.Tensor, bool], torch.Tensor],
    at_end: bool,
) -> None:
    rng = random.Random(8)
    sizes = ((1, 1, 1, 1), (2, 33, 20, 3), (16, 600, 64, 40), (70, 130, 40, 72), (65, 7, 129, 16))
    for case in (Case(*four) for four in (*sizes, (32, 64, 32, 64))):
        if not library.serves(case, mask):
            continue
        plain = [t.contiguous() for t in qkv(library, rng, case)]
        q, k, v = (guarded(t, at_end) for t in plain)
        out = guarded(torch.empty(2, 2, case.nq, case.dv, dtype=library.torch_dtype), at_end)
        lse = guarded(torch.empty(2, 2, case.nq), at_end)
        attn_mask = None
        if mask in EXPLICIT_MASKS:
            wide = explicit_mask(library, rng, case, mask).contiguous()
            attn_mask = guarded(wide.view(torch.uint8), at_end).view(torch.bool)
            if mask == "additive":
                attn_mask = guarded(wide, at_end)
        params = library.params((q, k, v), out, mask=mask, attn_mask=attn_mask, lse=lse)
        assert library.call(params) == abi.OK
        right, _, magnitude = reference((q, k, v), mask, None, attn_mask)
        assert_close(library, out, right, magnitude)


@each("none")
def test_gaps_between_output_rows_are_left_alone(library: Library, mask: str) -> None:
    rng = random.Random(9)
    for dv in (21, 32):
        case = Case(13, 50, 32, dv)
        if not library.serves(case, mask):
            continue
        tensors = qkv(library, rng, case)
        wide = torch.full((2, 13, 2, dv + 10), 7.0, dtype=library.torch_dtype)
        out = wide[..., 5 : dv + 5].transpose(1, 2)
        assert library.call(library.params(tensors, out)) == abi.OK
        right, _, magnitude = reference(tensors)
        assert_close(library, out, right, magnitude)
        assert (wide[..., :5] == 7).all()
        assert (wide[..., dv + 5 :] == 7).all()


@each("none")
def test_what_it_cannot_serve_is_refused_and_nothing_written(library: Library, mask: str) -> None:
    case = Case(4, 4, 32, 32)
    tensors = qkv(library, random.Random(10), case)
    out = torch.full((2, 2, 4, 32), 7.0, dtype=library.torch_dtype)
    other = next(code for name, code in abi.DTYPE_CODES.items() if name != library.dtype)
    refused = {"dtype": other, "heads_kv": 3, "struct_bytes": 8, "mask": 7}
    if not library.serves(replace(case, nq=4), "bool"):
        refused["mask"] = abi.MASK_CODES["bool"]
    for name, value in refused.items():
        params = library.params(tensors, out)
        setattr(params, name, value)
        assert library.call(params, NO_THREADS) == abi.REFUSED, name
    assert (out == 7).all()
