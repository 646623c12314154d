"""`cpu.flash` against a naive float64 reference, called through the C ABI alone."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from autofa import compiler, settings
from autofa.device import cpu_info, named_limits
from autofa.kernels.families.cpu_flash import FAMILY as CPU_FLASH
from autofa.problem import parse_shape
from autofa.runtime import abi

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Half a unit in the last place of an output, relative; f32 results are compared absolutely.
ROUNDING = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}
NONE, UPPER, LOWER = 0, 1, 2
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257)
HEAD_DIMS = (1, 3, 8, 20, 40, 64, 72, 80, 128, 160, 256)
# Every dtype and instruction set, tiles of each shape, every block size; one library each.
SLUGS = (
    "cpu.flash-v3-k4q3-b64-f32",
    "cpu.flash-v3-k6q2-b128-bf16",
    "cpu.flash-v3-k4q3-b256-f16",
    "cpu.flash-v4-k6q4-b128-f32",
    "cpu.flash-v4-k9q3-b64-f32",
    "cpu.flash-v4-k8q3-b64-bf16",
    "cpu.flash-v4-k6q4-b256-f16",
)
RANGE_FN = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
PARALLEL_FOR = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, RANGE_FN, ctypes.c_void_p
)
NO_THREADS = PARALLEL_FOR(0)
PROT_NONE = 0  # of mprotect(2)


def torch_threads() -> PARALLEL_FOR:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return ctypes.cast(library.torch_parallel_for, PARALLEL_FOR)


class Library:
    """One variant, loaded and called as abi.h says."""

    def __init__(self, slug: str) -> None:
        variant = CPU_FLASH.parse(slug)
        assert variant is not None
        (built,) = compiler.build([(variant, f"x86-64-{variant.params.isa}")], settings.load())
        assert built.library is not None, built.message
        self.slug = slug
        self.dtype = variant.dtype or ""
        self.torch_dtype = DTYPES[self.dtype]
        self.launch = ctypes.CDLL(str(built.library)).autofa_launch
        self.launch.argtypes = (ctypes.c_void_p,) * 3

    def params(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *,
        causal: int = NONE,
        scale: float | None = None,
        lse: torch.Tensor | None = None,
    ) -> abi.Params:
        p = abi.Params(ctypes.sizeof(abi.Params), abi.DTYPE_CODES[self.dtype], causal)
        p.device_index = -1
        p.q, p.k, p.v, p.out = (t.data_ptr() for t in (q, k, v, out))
        p.lse = None if lse is None else lse.data_ptr()
        p.batch, p.heads_q, p.seqlen_q, p.head_dim = q.shape
        _, p.heads_kv, p.seqlen_k, p.head_dim_v = v.shape
        for strides, tensor in zip(
            (p.q_strides, p.k_strides, p.v_strides, p.out_strides), (q, k, v, out), strict=True
        ):
            strides[:] = tensor.stride()[:3]
        p.scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        return p

    def call(
        self, params: abi.Params, parallel_for: PARALLEL_FOR = NO_THREADS, threads: int = 1
    ) -> int:
        pointer = ctypes.cast(parallel_for, ctypes.c_void_p)
        executor = abi.Executor(pointer, threads)
        return self.launch(ctypes.addressof(params), ctypes.addressof(executor), None)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, threads: int = 1, **options: object
    ) -> torch.Tensor:
        """The output, in a tensor that held NaN before."""
        out = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=self.torch_dtype)
        params = self.params(q, k, v, out, **options)  # type: ignore[arg-type]
        assert self.call(params, torch_threads() if threads > 1 else NO_THREADS, threads) == abi.OK
        return out


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The many small operations of the reference are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=SLUGS)
def library(request: pytest.FixtureRequest, session_cache: Path) -> Library:
    slug: str = request.param
    level = int(slug.split("-")[1][1:])
    if cpu_info().level < level:
        pytest.skip(f"this CPU is no x86-64-v{level}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOFA_CACHE_DIR", str(session_cache))
        return Library(slug)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: int = NONE,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q.double() @ k.transpose(-1, -2) * factor
    nq, nk = scores.shape[-2:]
    if causal != NONE:
        shift = nk - nq if causal == LOWER else 0
        hidden = torch.ones(nq, nk, dtype=torch.bool).triu(1 + shift)
        scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.clamp(min=-1e300).unsqueeze(-1))
    return weights @ v, lse


def assert_close(library: Library, out: torch.Tensor, right: torch.Tensor, atol: float) -> None:
    torch.testing.assert_close(out.double(), right, rtol=ROUNDING[library.dtype], atol=atol)


def tensor(library: Library, rng: random.Random, *shape: int) -> torch.Tensor:
    """Random values: contiguous, or rows of (B, N, H, D) with an offset and a gap."""
    batch, heads, length, dim = shape
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    if rng.random() < 0.5:
        return torch.randn(shape, generator=generator).to(library.torch_dtype)
    wide = torch.randn(batch, length, heads, dim + 3, generator=generator).to(library.torch_dtype)
    return wide[..., 1 : dim + 1].transpose(1, 2)


def qkv(
    library: Library,
    rng: random.Random,
    nq: int,
    nk: int,
    d: int,
    dv: int,
    hq: int = 2,
    hkv: int = 2,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        tensor(library, rng, 2, hq, nq, d),
        tensor(library, rng, 2, hkv, nk, d),
        tensor(library, rng, 2, hkv, nk, dv),
    )


def check(library: Library, rng: random.Random, *sizes: int, **options: object) -> None:
    q, k, v = qkv(library, rng, *sizes)
    lse = torch.full(q.shape[:3], math.nan)
    out = library.attend(q, k, v, lse=lse, **options)
    right, right_lse = reference(q, k, v, **options)  # type: ignore[arg-type]
    assert_close(library, out, right, 2e-5)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [NONE, UPPER, LOWER])
def test_ragged_lengths(library: Library, causal: int) -> None:
    rng = random.Random(causal)
    for nq, nk in [*zip(LENGTHS, LENGTHS, strict=True), *itertools.product(LENGTHS, LENGTHS)][::4]:
        check(library, rng, nq, nk, rng.choice((8, 20, 33)), 16, causal=causal)


@pytest.mark.parametrize("causal", [NONE, UPPER, LOWER])
def test_any_head_dims(library: Library, causal: int) -> None:
    rng = random.Random(causal)
    for d in HEAD_DIMS:
        check(library, rng, 70, 150, d, d, causal=causal)
        check(library, rng, 33, 20, d, rng.choice(HEAD_DIMS), causal=causal)


def test_grouped_heads(library: Library) -> None:
    rng = random.Random(0)
    for heads in ((4, 2), (6, 2), (5, 1)):
        for causal in (NONE, LOWER):
            check(library, rng, 40, 90, 24, 24, *heads, causal=causal)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-30, 0.3])
def test_scales(library: Library, scale: float) -> None:
    rng = random.Random(1)
    for causal in (NONE, UPPER):
        check(library, rng, 37, 140, 24, 24, causal=causal, scale=scale)


def test_large_logits_are_as_exact_as_sdpa(library: Library) -> None:
    rng = random.Random(2)
    q, k, v = qkv(library, rng, 65, 300, 64, 64)
    for scale in (50.0, 300.0, 1e30):
        right = reference(q, k, v, NONE, scale)[0]
        theirs = scaled_dot_product_attention(q, k, v, scale=scale).double()
        ours = library.attend(q, k, v, scale=scale).double()
        allowed = 3 * (theirs - right).abs().max().item() + 1e-5
        assert (ours - right).abs().max().item() <= allowed, scale


def test_rows_with_nothing_to_attend_are_zero(library: Library) -> None:
    rng = random.Random(3)
    for nq, nk, causal in ((5, 0, NONE), (70, 0, UPPER), (150, 40, LOWER), (33, 1, LOWER)):
        q, k, v = qkv(library, rng, nq, nk, 8, 12)
        lse = torch.full(q.shape[:3], math.nan)
        out = library.attend(q, k, v, causal=causal, lse=lse)
        empty = nq - nk
        assert (out[:, :, :empty] == 0).all()
        assert (lse[:, :, :empty] == -math.inf).all()
        assert lse[:, :, empty:].isfinite().all()


def test_no_queries_or_no_batch_is_no_work(library: Library) -> None:
    for shape in ((1, 2, 0, 8), (0, 2, 5, 8)):
        q = torch.empty(shape, dtype=library.torch_dtype)
        k = torch.empty((shape[0], 2, 4, 8), dtype=library.torch_dtype)
        assert library.attend(q, k, k).shape == shape


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("causal", [UPPER, LOWER])
def test_hidden_keys_never_contribute(library: Library, causal: int, poison: float) -> None:
    rng = random.Random(4)
    for nq, nk, first in ((40, 40, 21), (100, 160, 90), (90, 60, 47)):
        q, k, v = qkv(library, rng, nq, nk, 20, 20)
        right = reference(q, k, v, causal)[0]
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, :, first:] = poison
        bad_v[:, :, first:] = poison
        out = library.attend(q, bad_k, bad_v, causal=causal)
        unaware = first - (nk - nq if causal == LOWER else 0)  # queries that see none of them
        assert unaware > 0
        assert_close(library, out[:, :, :unaware], right[:, :, :unaware], 2e-5)


def test_a_nan_that_is_seen_comes_out(library: Library) -> None:
    rng = random.Random(5)
    q, k, v = qkv(library, rng, 20, 40, 24, 24)
    assert library.attend(q, k, v, scale=math.nan).isnan().all()
    for place in (q, k, v):
        before = place[0, 0, 0].clone()
        # All bits set is a NaN too, whose payload must not turn into an exponent.
        words = {2: torch.int16, 4: torch.int32}[place.element_size()]
        place[0, 0, 0] = torch.tensor([-1], dtype=words).view(place.dtype)
        assert library.attend(q, k, v)[0, 0, 0].isnan().all()
        place[0, 0, 0] = before


def test_same_bits_every_time_on_any_number_of_threads(library: Library) -> None:
    rng = random.Random(6)
    q, k, v = qkv(library, rng, 150, 150, 64, 64)
    torch.set_num_threads(3)
    for causal in (NONE, UPPER):
        first = library.attend(q, k, v, causal=causal)
        for threads in (1, 2, 2, 3):
            assert torch.equal(library.attend(q, k, v, threads, causal=causal), first)


def test_threads_come_from_the_executor_alone(library: Library) -> None:
    calls: list[tuple[int, int]] = []

    @PARALLEL_FOR
    def one_after_the_other(begin: int, end: int, grain: int, fn: Callable, arg: int) -> int:
        calls.append((begin, end))
        for i in range(begin, end):
            fn(i, i + 1, arg)
        return 0

    rng = random.Random(7)
    for nq, expected in ((3, []), (300, [(0, 7)])):
        q, k, v = qkv(library, rng, nq, nq, 32, 32)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        calls.clear()
        assert library.call(library.params(q, k, v, out), one_after_the_other, 7) == abi.OK
        assert calls == expected
        assert_close(library, out, reference(q, k, v)[0], 2e-5)


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
def test_nothing_outside_the_tensors_is_touched(
    library: Library, guarded: Callable[[torch.Tensor, bool], torch.Tensor], at_end: bool
) -> None:
    rng = random.Random(8)
    for nq, nk, d, dv in ((1, 1, 1, 1), (17, 33, 20, 3), (70, 130, 40, 72), (65, 7, 129, 16)):
        plain = [t.contiguous() for t in qkv(library, rng, nq, nk, d, dv)]
        q, k, v = (guarded(t, at_end) for t in plain)
        out = guarded(torch.empty(2, 2, nq, dv, dtype=library.torch_dtype), at_end)
        lse = guarded(torch.empty(2, 2, nq), at_end)
        for causal in (NONE, UPPER, LOWER):
            assert library.call(library.params(q, k, v, out, causal=causal, lse=lse)) == abi.OK
            assert_close(library, out, reference(*plain, causal)[0], 2e-5)


def test_gaps_between_output_rows_are_left_alone(library: Library) -> None:
    rng = random.Random(9)
    q, k, v = qkv(library, rng, 37, 50, 16, 21)
    wide = torch.full((2, 37, 2, 40), 7.0, dtype=library.torch_dtype)
    out = wide[..., 5:26].transpose(1, 2)
    assert library.call(library.params(q, k, v, out)) == abi.OK
    assert_close(library, out, reference(q, k, v)[0], 2e-5)
    assert (wide[..., :5] == 7).all()
    assert (wide[..., 26:] == 7).all()


def test_what_it_cannot_serve_is_refused_and_nothing_written(library: Library) -> None:
    q, k, v = qkv(library, random.Random(10), 4, 4, 8, 8)
    out = torch.full((2, 2, 4, 8), 7.0, dtype=library.torch_dtype)
    other = next(code for name, code in abi.DTYPE_CODES.items() if name != library.dtype)
    refused = {"mask": 1, "dtype": other, "heads_kv": 3, "struct_bytes": 8}
    for name, value in refused.items():
        params = library.params(q, k, v, out)
        setattr(params, name, value)
        assert library.call(params) == abi.REFUSED, name
    params = library.params(q, k, v, out)
    params.head_dim = 2**42
    assert library.call(params, torch_threads(), 2) == abi.NO_MEMORY
    assert (out == 7).all()


@pytest.mark.parametrize("arch", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_space_is_small_and_of_one_instruction_set(arch: str, dtype: str) -> None:
    problem = parse_shape("1,8,512,64", dtype=dtype, device="cpu")
    variants = CPU_FLASH.legal(problem, named_limits(arch))
    assert 4 <= len(variants) <= 24
    assert {v.target(named_limits(arch)) for v in variants} == {arch}


@pytest.mark.parametrize(
    ("shape", "dtype", "mask", "features", "expected"),
    [
        ("1,8,512,64", "f32", "none", (), True),
        ("1,8,1/4096,64", "f32", "none", (), False),
        ("1,8,512/4,64", "f32", "causal", (), False),
        ("1,1,8,8", "f32", "none", (), True),
        ("1,8,16/32,64", "f32", "causal", (), True),
        ("1,8,1/64,64", "f32", "none", (), False),
        ("1,8,8,512", "f32", "none", (), False),
        ("1,8,512,512", "f32", "none", (), False),
        ("1,8,512,64", "bf16", "none", (), True),
        ("1,8,512,64", "bf16", "none", ("amx_bf16",), False),
        ("1,8,512,64", "f16", "none", ("amx_bf16",), True),
    ],
)
def test_answers_unmeasured_only_where_it_was_clearly_faster(
    shape: str, dtype: str, mask: str, features: tuple[str, ...], expected: bool
) -> None:
    limits = replace(named_limits("x86-64-v4"), features=frozenset(features))
    problem = parse_shape(shape, dtype=dtype, mask=mask, device="cpu")
    assert CPU_FLASH.unmeasured(problem, limits) is expected
