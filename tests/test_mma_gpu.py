"""Every CUDA family on a GPU: as exact as SDPA's math, and the same bits every time.

Every pair of (dtype and accumulation, mask, head dim) is built once; group sizes and lengths go
round beside them. Prints the largest errors of each family with `-s`.
"""

from __future__ import annotations

import itertools
import math
from ctypes import CDLL
from dataclasses import dataclass

import cuda_variants
import pytest
import torch
from cuda_variants import CASES, TORCH, Case
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofa import compiler, settings
from autofa.device import Limits
from autofa.kernels import REGISTRY
from autofa.kernels.family import KernelFamily, Variant
from autofa.problem import EXPLICIT_MASKS, MASKS, Problem
from autofa.runtime import abi, devices

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc, pytest.mark.timeout(600)]

FAMILIES = tuple(f for f in REGISTRY.families if f.domain.device == "cuda")
HEAD_DIMS = (8, 40, 64, 72, 96, 128, 160, 192, 256, 320, 512, 576, 1024)
KINDS = (("f16", "f32"), ("bf16", "f32"), ("f16", "f16"))
GROUPS = (1, 4, 8)
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129, 200, 256, 257, 8191)
_PER_VARIANT = 4
# Sums in f16, of up to 1024 products and some hundred weights: at most 8.2 on an H200.
_TIMES = {"f32": 2.0, "fast": 16.0}


@dataclass(frozen=True)
class Errors:
    """Largest errors of one output against float64, of the kernel and of SDPA's math."""

    kernel: float
    math: float
    largest: float


def chosen(family: KernelFamily, limits: Limits) -> list[Variant]:
    """One variant for each mask and head dim; dtypes, accumulation and parameters take turns."""
    dims = [d for d in HEAD_DIMS if d in family.domain.head_dims]
    masks = [m for m in MASKS if m in family.domain.masks]
    found: list[Variant] = []
    for index, (mask, head_dim) in enumerate(itertools.product(masks, dims)):
        dtype, accumulate = KINDS[(index + index // len(dims)) % len(KINDS)]
        kind = cuda_variants.Kind(dtype, mask, head_dim)
        problem = cuda_variants.long_problem(family, kind, limits)
        legal = [
            v
            for v in ([] if problem is None else family.legal(problem, limits))
            if getattr(v.params, "accumulate", "f32") == accumulate
        ]
        if legal:
            found.append(legal[0] if index % 3 == 0 else legal[7 * index % len(legal)])
    return found


def shapes(index: int) -> list[Case]:
    found = []
    for step in range(index * _PER_VARIANT, (index + 1) * _PER_VARIANT):
        heads_kv = 1 + step % 2
        heads_q = heads_kv * GROUPS[step % len(GROUPS)]
        rows = LENGTHS[step % len(LENGTHS)]
        keys = LENGTHS[(step * 5 + 3) % len(LENGTHS)] if step % 4 else rows
        found.append(Case(f"{step}", heads_q, heads_kv, rows, keys, "bnhd", batch=1 + step % 2))
    return found


def errors(library: CDLL, variant: Variant, case: Case) -> Errors:
    """One call, 20 times over: the same bits, and how exact they are on some rows."""
    assert variant.dtype is not None
    assert variant.head_dim is not None
    assert variant.mask is not None
    dtype, head_dim, mask = TORCH[variant.dtype], variant.head_dim, variant.mask

    def random(heads: int, rows: int) -> torch.Tensor:
        dense = torch.randn(case.batch, rows, heads, head_dim, dtype=dtype, device="cuda")
        return dense.transpose(1, 2)

    q = random(case.heads_q, case.seqlen_q)
    k, v = random(case.heads_kv, case.seqlen_k), random(case.heads_kv, case.seqlen_k)
    scale = head_dim**-0.5
    attn_mask = None
    if mask in EXPLICIT_MASKS:
        visible = torch.rand(1, case.heads_q, case.seqlen_q, case.seqlen_k, device="cuda") < 0.8
        visible[..., 0] = True
        attn_mask = visible
        if mask == "additive":
            attn_mask = torch.randn_like(visible, dtype=dtype).masked_fill(~visible, -math.inf)
        attn_mask = attn_mask.expand(case.batch, -1, -1, -1)
    out = torch.full_like(q, math.nan)
    assert cuda_variants.launch(library, mask, (q, k, v, out), None, scale, attn_mask) == abi.OK
    for _ in range(19):
        again = torch.full_like(q, math.nan)
        cuda_variants.launch(library, mask, (q, k, v, again), None, scale, attn_mask)
        assert torch.equal(out.view(torch.int16), again.view(torch.int16))

    rows = torch.unique(torch.linspace(0, case.seqlen_q - 1, 128, device="cuda").long())
    where = torch.arange(case.seqlen_k, device="cuda")[None] - rows[:, None]
    shift = {"causal": 0, "causal_lower_right": case.seqlen_k - case.seqlen_q}.get(mask)
    part = None if attn_mask is None else attn_mask[:, :, rows]
    if shift is not None:
        part = where <= shift
    group = case.heads_q // case.heads_kv
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    exact, _ = cuda_variants.reference(
        q[:, :, rows], k, v, "bool" if shift is not None else mask, scale, part
    )
    with sdpa_kernel(SDPBackend.MATH):
        usual = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, rows], wide_k, wide_v, part, scale=scale
        )
    empty = torch.zeros(len(rows), 1, dtype=torch.bool, device="cuda")
    if shift is not None:
        empty = ~part.any(-1, keepdim=True)
    exact = exact.masked_fill(empty, 0.0)
    usual = usual.masked_fill(empty, 0.0)
    got = out[:, :, rows].double()
    assert bool(got.isfinite().all())
    return Errors(
        float((got - exact).abs().max()),
        float((usual.double() - exact).abs().max()),
        float(exact.abs().max()),
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_as_exact_as_sdpa_and_repeatable(
    family: KernelFamily, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    limits = devices.limits(torch.device("cuda", 0))
    variants = chosen(family, limits)
    builds = compiler.build([(v, v.target(limits)) for v in variants], settings.load())
    worst = {"f32": 0.0, "fast": 0.0}
    count = 0
    wrong: list[str] = []
    for index, done in enumerate(builds):
        assert done.library is not None, done.message
        assert done.variant.dtype is not None
        library = cuda_variants.load(done.library)
        kind = done.variant.accuracy(done.variant.dtype)
        unit = 2.0 ** -(11 if done.variant.dtype == "f16" else 8)
        for case in shapes(index):
            found = errors(library, done.variant, case)
            count += 1
            # SDPA may be exact by luck; half a unit in the last place is what any result may have.
            allowed = _TIMES[kind] * max(found.math, unit * found.largest)
            worst[kind] = max(worst[kind], found.kernel / max(allowed / _TIMES[kind], 1e-30))
            if found.kernel > allowed:
                wrong.append(f"{done.variant.slug} {case}: {found}")
    with capsys.disabled():
        print(
            f"\n{family.name}: {len(builds)} variants, {count} calls; error at most "
            f"{worst['f32']:.2f}x of SDPA math with f32 sums, {worst['fast']:.2f}x with f16 sums"
        )
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_odd_cases_are_right(family: KernelFamily) -> None:
    limits = devices.limits(torch.device("cuda", 0))
    kinds = [
        cuda_variants.Kind(dtype, mask, head_dim)
        for head_dim, dtype in (
            (64, "bf16"),
            (72, "f16"),
            (256, "bf16"),
            (512, "f16"),
            (1024, "bf16"),
        )
        for mask in MASKS
    ]
    variants = cuda_variants.cover(family, kinds, limits)
    for done in compiler.build([(v, v.target(limits)) for v in variants], settings.load()):
        assert done.library is not None, done.message
        library = cuda_variants.load(done.library)
        for case in CASES:
            cuda_variants.check(library, done.variant, case, device="cuda:0")


@pytest.mark.parametrize("head_dim", [320, 384, 512, 768, 1024])
def test_clusters_are_right_over_many_steps(head_dim: int) -> None:
    """All rows of a call in which blocks of a cluster send each other weights in each of many
    steps. What is overwritten before it was read changes the output by far more than rounding
    does; in small calls it was never seen."""
    torch.manual_seed(0)
    limits = devices.limits(torch.device("cuda", 0))
    problem = Problem("bf16", 1, 8, 8, 8192, 8192, head_dim, head_dim)
    family = next(
        f for f in FAMILIES if f.name.startswith("hopper.") and head_dim in f.domain.head_dims
    )
    variant = family.default_variant(problem, limits)
    if variant is None:
        pytest.skip("clusters are for sm_90a")
    (done,) = compiler.build([(variant, variant.target(limits))], settings.load())
    assert done.library is not None, done.message
    library = cuda_variants.load(done.library)
    q, k, v = (
        torch.randn(1, 8, 8192, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(3)
    )
    scale = head_dim**-0.5
    out = torch.full_like(q, math.nan)
    assert cuda_variants.launch(library, "none", (q, k, v, out), None, scale) == abi.OK
    for first in range(0, 8192, 1024):
        rows = slice(first, first + 1024)
        with sdpa_kernel(SDPBackend.MATH):
            exact = torch.nn.functional.scaled_dot_product_attention(
                q[:, :, rows].float(), k.float(), v.float(), scale=scale
            )
        torch.testing.assert_close(out[:, :, rows].float(), exact, rtol=2**-7, atol=4e-4)
    for _ in range(50):
        again = torch.full_like(q, math.nan)
        cuda_variants.launch(library, "none", (q, k, v, again), None, scale)
        assert torch.equal(out.view(torch.int16), again.view(torch.int16))
