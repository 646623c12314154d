"""Declarations: every family and vendor kernel keeps the rules that all else relies on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofa.device import CpuInfo, Limits, cpu_limits, cuda_limits
from autofa.errors import UsageError
from autofa.kernels import REGISTRY
from autofa.kernels.family import KernelFamily, Variant
from autofa.kernels.vendor import BASELINE
from autofa.problem import MASKS, Problem, parse_shape

MACHINES = [
    *(cuda_limits(a) for a in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")),
    cpu_limits(2, CpuInfo("v3", 3, frozenset())),
    cpu_limits(2, CpuInfo("v4", 4, frozenset({"amx_bf16"}))),
    cpu_limits(2, CpuInfo("old", 0, frozenset())),
]
FAMILIES = pytest.mark.parametrize("family", REGISTRY.families, ids=lambda f: f.name)


def problems(family: KernelFamily) -> list[Problem]:
    head_dims = [
        d for d in (1, 16, 20, 64, 80, 128, 256, 512, 1024) if d in family.domain.head_dims
    ]
    return [
        replace(parse_shape(f"{shape},{d}", dtype=dtype, mask=mask), device=family.domain.device)
        for shape in ("2,4/2,100/90", "2,4/2,1/90")
        for d in head_dims
        for dtype in family.domain.dtypes
        for mask in family.domain.masks
    ]


def served(family: KernelFamily) -> list[tuple[Problem, Limits]]:
    return [
        (p, limits)
        for limits in MACHINES
        for p in problems(family)
        if family.domain.refusal(p, limits) is None
    ]


@FAMILIES
def test_the_default_is_always_legal(family: KernelFamily) -> None:
    cases = served(family)
    assert cases
    for problem, limits in cases:
        default = family.default_variant(problem, limits)
        assert default is not None
        assert default.refusal(problem, limits) is None
        assert family.legal(problem, limits)[0] == default


@FAMILIES
def test_slugs_are_unique_and_parse_back(family: KernelFamily) -> None:
    every = problems(family)
    for problem in (every[0], every[len(every) // 2], every[-1]):  # a space has thousands of points
        variants = list(family.points(problem))
        assert len({v.slug for v in variants}) == len(variants)
        for variant in variants:
            assert REGISTRY.candidate(variant.slug) == variant


@FAMILIES
def test_constraints_and_params_are_named_and_explained(family: KernelFamily) -> None:
    assert all(c.name and c.reason for c in family.constraints)
    names = [p.name for p in family.params]
    assert len(set(names)) == len(names)
    assert all(p.about and "{}" in p.label for p in family.params)


@FAMILIES
def test_nothing_is_served_outside_the_domain(family: KernelFamily) -> None:
    problem, limits = served(family)[0]
    for mask in set(MASKS) - set(family.domain.masks):
        assert family.legal(replace(problem, mask=mask), limits) == []
    other = "cuda" if problem.device == "cpu" else "cpu"
    assert family.legal(replace(problem, device=other), limits) == []


@given(st.text(max_size=60))
def test_foreign_slugs_find_nothing(text: str) -> None:
    assert REGISTRY.find(text) is None or text in {v.slug for v in REGISTRY.vendors}


@pytest.mark.parametrize("family", REGISTRY.families, ids=lambda family: str(family.name))
@pytest.mark.parametrize("text", ["{}", "{}-zz9", "{}x"])
def test_what_is_no_whole_slug_is_told_one(family: KernelFamily, text: str) -> None:
    with pytest.raises(UsageError, match=r"whole slug, such as \S+$") as raised:
        REGISTRY.candidate(text.format(family.name))
    named = REGISTRY.candidate(str(raised.value).rpartition(" ")[2])
    assert isinstance(named, Variant)
    assert named.family is family


def test_unknown_kernel_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"did you mean torch\.flash"):
        REGISTRY.candidate("torch.flahs")
    with pytest.raises(UsageError, match="autofa kernels"):
        REGISTRY.family("nothing")


def test_the_baseline_serves_everything_and_comes_first() -> None:
    for device, limits in (("cpu", MACHINES[-1]), ("cuda", MACHINES[0])):
        for mask in MASKS:
            problem = parse_shape("2,4/2,100/90,520/8", dtype="f32", mask=mask, device=device)
            assert REGISTRY.legal(problem, limits)[0] == REGISTRY.candidate(BASELINE)


def test_vendor_domains() -> None:
    h200 = cuda_limits("sm_90a")
    flash, cudnn = REGISTRY.candidate("torch.flash"), REGISTRY.candidate("torch.cudnn")
    wide = parse_shape("1,8,1024,320", dtype="bf16")
    assert flash.refusal(wide, h200) is not None
    assert cudnn.refusal(wide, h200) is not None
    assert flash.refusal(parse_shape("1,8,1024,128", dtype="f32"), h200) is not None
    assert flash.refusal(parse_shape("1,8,1024,128", dtype="f16"), h200) is None
    corner = parse_shape("1,8,10/20,64", dtype="f16", mask="causal")
    assert "seqlen" in (flash.refusal(corner, h200) or "")


def test_ties_prefer_the_simple() -> None:
    order = [BASELINE, "torch.flash", "torch.unfused"]
    assert sorted(("torch.unfused", BASELINE, "torch.flash"), key=REGISTRY.simplicity) == order
    for family in REGISTRY.families:
        problem, limits = served(family)[0]
        for variant in family.legal(problem, limits):
            assert isinstance(variant, Variant)
            assert REGISTRY.simplicity(variant.slug) > REGISTRY.simplicity("torch.unfused")


def test_accuracy_classes() -> None:
    unfused = REGISTRY.candidate("torch.unfused")
    assert (unfused.accuracy("f16"), unfused.accuracy("f32")) == ("fast", "f32")
    assert REGISTRY.candidate(BASELINE).accuracy("bf16") == "f32"
    for family in REGISTRY.families:
        problem, limits = served(family)[0]
        assert family.legal(problem, limits)[0].accuracy(problem.dtype) == "f32"
