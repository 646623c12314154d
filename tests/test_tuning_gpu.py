"""A tune on a CUDA GPU with candidates among the others that fail in every way there is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from poison.families import CUDA_CASES, CUDA_REGISTRY

from autofa import settings
from autofa.bench import WorkerOptions
from autofa.kernels import REGISTRY, Registry
from autofa.problem import Problem
from autofa.store.repository import Repository
from autofa.tuning.events import BucketDone, Event, Summary
from autofa.tuning.hardware import open_lab
from autofa.tuning.lab import Lab
from autofa.tuning.request import TuneRequest
from autofa.tuning.session import tune

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

BEFORE = Problem("bf16", 2, 16, 16, 4096, 4096, 128, 128, "none", "cuda")
POISONED = Problem("f32", 1, 4, 4, 256, 256, 64, 64, "causal", "cuda")
AFTER = Problem("bf16", 1, 8, 8, 1024, 1024, 64, 64, "none", "cuda")
LIMIT_S = 8.0
# Of each poison, beside its time limit.
COST_S = 5.0


@contextmanager
def impatient_lab(request: TuneRequest) -> Iterator[Lab]:
    with open_lab(request, WorkerOptions(check_timeout_s=LIMIT_S)) as lab:
        yield lab


def tuned(db: Path, cache: Path, registry: Registry) -> tuple[Summary, dict[Problem, float]]:
    """What came of the three problems, and how many seconds each took."""
    done: dict[Problem, float] = {}

    def note(event: Event) -> None:
        if isinstance(event, BucketDone):
            done[event.result.problem] = event.result.seconds

    request = TuneRequest(
        (BEFORE, POISONED, AFTER),
        "cuda:0",
        str(db),
        trials=12,
        registry=registry,
        settings=replace(settings.load(), cache_dir=cache),
    )
    return tune(request, note, laboratory=impatient_lab), done


def test_poison_in_the_middle_of_a_tune_costs_its_time_limit_and_changes_nothing_else(
    tmp_path: Path, session_cache: Path
) -> None:
    tuned(tmp_path / "first.db", session_cache, REGISTRY)  # fills the library cache
    clean, seconds_clean = tuned(tmp_path / "clean.db", session_cache, REGISTRY)
    families = (*REGISTRY.families, *CUDA_REGISTRY.families)
    began = time.monotonic()
    poisoned, seconds = tuned(
        tmp_path / "poisoned.db", session_cache, replace(REGISTRY, families=families)
    )
    print(f"{time.monotonic() - began:.1f} s with poison: {seconds}; without: {seconds_clean}")
    assert len(poisoned.buckets) == 3
    assert all(bucket.complete for bucket in poisoned.buckets)

    with Repository.open(str(tmp_path / "poisoned.db"), write=False) as repository:
        rows = repository.rows()
    status = {row.slug.rpartition("-")[0]: row.status for row in rows if row.problem == POISONED}
    for case in CUDA_CASES:
        assert status[case.family.name] == case.status
    assert {row.status for row in rows if row.problem != POISONED} == {"ok"}

    hung = sum(case.status == "timeout" for case in CUDA_CASES)
    spent = seconds[POISONED] - seconds_clean[POISONED]
    assert spent <= hung * LIMIT_S + len(CUDA_CASES) * COST_S
    # As fast as without poison, where a call is long enough to be told from its host's share.
    speedups = [bucket.speedup or 0.0 for run in (clean, poisoned) for bucket in run.buckets[:1]]
    assert speedups[1] > 0.9 * speedups[0]
