"""Checking, timing and isolation on a CUDA GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from poison.families import CUDA_CASES, CUDA_HONEST, CUDA_REGISTRY, Poison

from autofa import compiler, settings
from autofa.bench import Entrant, Plan, Worker, WorkerOptions
from autofa.compiler import Build
from autofa.device import Limits
from autofa.kernels.vendor import BASELINE, CUDNN, EFFICIENT, FLASH, UNFUSED
from autofa.problem import Problem

SMALL = Problem("f32", 1, 4, 4, 256, 256, 64, 64, "causal", "cuda")
BIG = Problem("bf16", 2, 16, 16, 4096, 4096, 128, 128, "none", "cuda")
TINY = Problem("bf16", 1, 8, 8, 128, 128, 64, 64, "none", "cuda")

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]


@pytest.fixture(scope="module")
def limits() -> Limits:
    from autofa.runtime import devices

    return devices.limits(devices.find_device("cuda:0"))


@pytest.fixture(scope="module")
def builds(session_cache: Path, limits: Limits) -> dict[str, Build]:
    requests = []
    for family in CUDA_REGISTRY.families:
        variant = family.default_variant(SMALL, limits)
        assert variant is not None
        requests.append((variant, variant.target(limits)))
    here = replace(settings.load(), cache_dir=session_cache)
    return {build.variant.family.name: build for build in compiler.build(requests, here)}


@pytest.fixture(scope="module")
def worker(limits: Limits) -> Iterator[Worker]:
    with Worker("cuda:0", limits, WorkerOptions(check_timeout_s=8.0)) as shared:
        yield shared


@pytest.mark.parametrize("problem", [SMALL, BIG, TINY], ids=str)
def test_vendors_are_right(worker: Worker, limits: Limits, problem: Problem) -> None:
    for vendor in (FLASH, EFFICIENT, CUDNN, UNFUSED):
        if vendor.refusal(problem, limits) is None:
            outcome = worker.check(vendor, None, problem)
            assert outcome.ok, outcome


@pytest.mark.parametrize("poison", CUDA_CASES, ids=lambda poison: poison.family.folder)
def test_poison_gets_its_status_and_the_next_candidate_is_served(
    worker: Worker, builds: dict[str, Build], poison: Poison
) -> None:
    build = builds[poison.family.name]
    outcome = worker.check(build.variant, build.library, SMALL)
    assert outcome.status == poison.status
    assert poison.message in outcome.message
    honest = builds[CUDA_HONEST.name]
    assert worker.check(honest.variant, honest.library, SMALL).ok


def test_an_illegal_access_in_timing_costs_only_its_own_candidate(
    worker: Worker, builds: dict[str, Build]
) -> None:
    names = (CUDA_HONEST.name, "poison.cuda_illegal")
    field = [Entrant(builds[name].variant, builds[name].library) for name in names]
    honest, illegal, baseline = worker.time(field, SMALL, Plan(budget_s=1.0)).outcomes
    assert illegal.status == "crashed"
    assert "illegal" in illegal.message
    assert honest.timing is not None
    assert baseline.timing is not None
    assert baseline.timing.time_ms < honest.timing.time_ms


def test_device_time_excludes_the_host_and_call_time_includes_it(worker: Worker) -> None:
    for problem in (TINY, BIG):
        run = worker.time([Entrant(UNFUSED)], problem)
        assert json.loads(run.conditions)["sm_mhz"] > 0
        baseline = next(outcome for outcome in run.outcomes if outcome.slug == BASELINE)
        assert baseline.timing is not None
        ratio = baseline.timing.call_ms / baseline.timing.time_ms
        assert ratio > 1.5 if problem is TINY else 0.95 < ratio < 1.1
        # At most 989 TFLOPS: whatever is faster has not run.
        assert problem.tflops(baseline.timing.time_ms) < 1000
