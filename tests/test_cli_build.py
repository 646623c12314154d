"""`autofa build`: what it compiles unasked, and what it says while it does."""

from __future__ import annotations

from importlib import import_module

import pytest

from autofa.cli import _run
from autofa.compiler import Build
from autofa.device import cuda_limits, named_limits
from autofa.kernels import REGISTRY
from autofa.kernels.catalog import USUAL_HEAD_DIMS, defaults, head_dims_of, listing
from autofa.kernels.family import KernelFamily
from autofa.problem import Problem
from autofa.settings import Settings

build = import_module("autofa.cli.build")
FAMILIES = pytest.mark.parametrize("family", REGISTRY.families, ids=lambda family: family.name)


def arch_of(family: KernelFamily) -> str:
    return "sm_90a" if family.domain.device == "cuda" else "x86-64-v4"


@FAMILIES
def test_a_listing_is_what_the_variants_say(family: KernelFamily) -> None:
    limits = named_limits(arch_of(family))
    dim = max(d for d in (40, 96, 256, 320, 1024) if d in family.domain.head_dims)
    found = listing(family, limits, (dim,))
    legal, total = {}, set()
    for dtype in family.domain.dtypes:
        for mask in family.domain.masks:
            for n in (1024, 1):
                problem = Problem(dtype, 1, 8, 8, n, 1024, dim, dim, mask, family.domain.device)
                if family.domain.refusal(problem, limits) is None:
                    break
            for variant in family.points(problem):
                total.add(variant.slug)
                if variant.refusal(problem, limits) is None:
                    legal[variant.slug] = variant
    assert {variant.slug for variant in found.legal} == set(legal)
    assert len(found.points) == len(legal)
    assert found.total == len(total)


@FAMILIES
def test_defaults_are_of_every_usual_head_dim_and_few(family: KernelFamily) -> None:
    limits = named_limits(arch_of(family))
    found = defaults(family, limits)
    if family.domain.extra:
        return  # of a CPU with more than its level says
    assert found
    if "head_dim" in family.specialised:
        assert {v.head_dim for v in found} == set(head_dims_of(family)) <= set(USUAL_HEAD_DIMS)
    assert len(found) <= 8 * len(USUAL_HEAD_DIMS)
    for variant in found:
        assert variant.mask in (None, "none", "causal")


def requests_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[tuple[object, str]]:
    asked: list[tuple[object, str]] = []

    def compile_variants(
        requests: list[tuple[object, str]], *a: object, **b: object
    ) -> list[Build]:
        asked.extend(requests)
        return []

    monkeypatch.setattr(build, "compile_variants", compile_variants)
    assert _run(["build", *arguments]) == 0
    return asked


def test_without_a_selection_the_defaults_are_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = requests_of(monkeypatch, "--arch", "sm_80,sm_90a")
    assert {target for _, target in few} == {"sm_80", "sm_90a"}
    wanted = sum(
        len(defaults(family, cuda_limits(arch)))
        for family in REGISTRY.families
        if family.domain.device == "cuda"
        for arch in ("sm_80", "sm_90a")
    )
    assert len(few) == wanted
    said = capsys.readouterr().err
    assert f"{wanted} variants, {wanted} to compile: about" in said
    many = requests_of(
        monkeypatch, "--arch", "sm_80", "--head-dim", "64", "--families", "mma.split_q"
    )
    assert len(many) == len(
        listing(REGISTRY.family("mma.split_q"), cuda_limits("sm_80"), (64,)).points
    )


@pytest.mark.parametrize(("step", "lines"), [(0.2, 9), (20.0, 51)])
def test_a_log_gets_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], step: float, lines: int
) -> None:
    family = REGISTRY.family("cpu.flash")
    variants = listing(family, named_limits("x86-64-v4")).legal * 4
    requests = [(variant, "x86-64-v4") for variant in variants][:102]
    time = 0.0
    progress = build._Progress(requests, Settings(), 2, now=lambda: time)
    for variant, target in requests:
        time += step
        progress.show(Build(variant, target, "ok"))
    progress.end()
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("102 variants, ")
    assert len(others) == lines
    assert all("/102] about " in line for line in others)


def test_what_is_there_is_not_announced(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["build", "--families", "cpu.flash", "--select", "*f32", "--limit", "1"]
    assert _run(arguments) == 0
    capsys.readouterr()
    assert _run(arguments) == 0
    assert capsys.readouterr().err == "0 compiled, 1 already there, 0 failed\n"
