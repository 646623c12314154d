"""What a tune searches, given the precision that its results would be used at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tuning_simulation import DEVICE, PROBLEM, Simulation, family, registry

import autofa
from autofa.dispatch import state
from autofa.problem import Problem
from autofa.settings import Settings
from autofa.store.repository import Repository
from autofa.tuning.events import Summary
from autofa.tuning.request import TuneRequest
from autofa.tuning.session import tune

FAMILY = family("sim.sums", {"accumulate": ("f32", "f16"), "m": (1, 2)})  # type: ignore[dict-item]
REGISTRY = registry(FAMILY)


def times(slug: str, problem: Problem) -> float:
    return 0.5 if "accumulatexf16" in slug else 0.8 if slug.startswith("sim.") else 1.0


def run(db: Path, precision: str, **fields: object) -> tuple[Simulation, Summary]:
    settings = Settings(precision=precision)
    sim = Simulation(times)
    request = TuneRequest((PROBLEM,), "cpu", str(db), registry=REGISTRY, settings=settings)
    return sim, tune(replace(request, **fields), laboratory=sim.laboratory)  # type: ignore[arg-type]


def rows_of(db: Path) -> set[str]:
    with Repository.open(db, write=False) as repository:
        return {row.slug for row in repository.rows(device=DEVICE)}


def test_less_exact_variants_are_searched_only_where_they_would_be_used(tmp_path: Path) -> None:
    db = tmp_path / "autofa.db"
    sim, summary = run(db, "f32")
    assert {slug for slug, _ in sim.timed if slug.startswith("sim.")} == {
        "sim.sums-accumulatexf32-mx1",
        "sim.sums-accumulatexf32-mx2",
    }
    assert {"torch.flash", "torch.unfused"} <= {slug for slug, _ in sim.timed}
    assert not any("f16" in slug for slug in sim.compiled)
    assert summary.buckets[0].winner == "sim.sums-accumulatexf32-mx1"

    sim, summary = run(db, "fast")
    assert "sim.sums-accumulatexf16-mx1" in {slug for slug, _ in sim.timed}
    assert summary.buckets[0].winner == "sim.sums-accumulatexf16-mx1"

    # What was measured then stays, and wins nothing where it would not be used.
    sim, summary = run(db, "f32")
    assert sim.timed == []
    assert "sim.sums-accumulatexf16-mx1" in rows_of(db)
    assert summary.buckets[0].winner == "sim.sums-accumulatexf32-mx1"
    assert summary.buckets[0].speedup == pytest.approx(1.25)


def test_the_precision_is_what_set_precision_said_else_the_environments() -> None:
    fast = Settings(precision="fast")
    was = state.STATE.off
    state.STATE.off = "not started"
    try:
        assert state.precision(fast) == "fast"
    finally:
        state.STATE.off = was
    autofa.set_precision("fast")
    try:
        assert state.precision(Settings()) == "fast"
    finally:
        autofa.set_precision("f32")
    assert state.precision(fast) == "f32"
