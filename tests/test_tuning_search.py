"""The search within one problem: what it gives, in which order, and how soon it finds the best."""

from __future__ import annotations

import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning_simulation import LIMITS, PROBLEM, family

from autofa.kernels.family import KernelFamily, Params, Variant
from autofa.tuning.search import BucketSearch, FamilySearch

Surface = Callable[[Params], float]

LARGE = family("sim.large", {f"p{i}": tuple(range(5)) for i in range(4)})  # 625 points


def bowl(p: Params) -> float:
    """Smooth, with its minimum inside and unequal weights."""
    point = (p.p0 - 3, p.p1 - 1, p.p2 - 2, p.p3 - 4)
    return sum(w * d * d for w, d in zip((0.3, 0.1, 0.05, 0.2), point, strict=True))


def ridge(p: Params) -> float:
    """Two parameters matter together, as a tile and its warps do; one does not matter at all."""
    return 0.4 * abs(p.p0 - p.p1) + 0.1 * abs(p.p0 - 4) + 0.15 * abs(p.p2 - 1)


def search_of(
    own: KernelFamily, trials: int, seed: int = 0, hints: tuple[Variant, ...] = ()
) -> FamilySearch:
    legal = own.legal(PROBLEM, LIMITS)
    return FamilySearch(own, legal, hints, trials=trials, seed=seed)


def drive(search: FamilySearch, surface: Surface, trials: int, batch: int = 8) -> list[float]:
    """Costs in the order they were measured."""
    costs: list[float] = []
    while len(costs) < trials:
        asked = [v for v in (search.ask() for _ in range(min(batch, trials - len(costs)))) if v]
        if not asked:
            break
        for variant in asked:
            costs.append(surface(variant.params))
            search.tell(variant, costs[-1])
    return costs


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 12),
    st.integers(0, 2**16),
    st.randoms(use_true_random=False),
)
def test_every_legal_variant_is_asked_for_once_and_no_other(
    sizes: list[int], trials: int, seed: int, chance: random.Random
) -> None:
    """Whether it walks or samples, and whatever of it fails."""
    own = family(
        "sim.any",
        {f"p{i}": tuple(range(size)) for i, size in enumerate(sizes)},
        illegal=lambda p: p.p0 == 1,
    )
    legal = [v.slug for v in own.legal(PROBLEM, LIMITS)]
    search = search_of(own, trials, seed)
    asked = []
    while (variant := search.ask()) is not None:
        asked.append(variant.slug)
        search.tell(variant, None if chance.random() < 0.3 else chance.random())
    assert sorted(asked) == sorted(legal)
    assert asked[0] == legal[0], "the default comes first"


@pytest.mark.parametrize("surface", [bowl, ridge])
def test_it_finds_the_best_in_far_fewer_trials_than_there_are_points(surface: Surface) -> None:
    """Within 5% of the best of 625 points after 64 trials, in most seeds; sooner than chance."""
    best = min(surface(v.params) for v in LARGE.legal(PROBLEM, LIMITS))

    def first_good(costs: list[float]) -> float:
        good = [i for i, c in enumerate(costs) if c <= best + math.log(1.05)]
        return good[0] if good else math.inf

    found, chance = [], []
    for seed in range(7):
        found.append(first_good(drive(search_of(LARGE, 64, seed), surface, 64)))
        shuffled = [surface(v.params) for v in LARGE.legal(PROBLEM, LIMITS)]
        random.Random(seed).shuffle(shuffled)
        chance.append(first_good(shuffled))
    assert statistics.median(found) < 64
    assert statistics.median(found) < statistics.median(chance)


def test_the_same_seed_gives_the_same_search() -> None:
    runs = [drive(search_of(LARGE, 24, seed=5), bowl, 24) for _ in range(2)]
    assert runs[0] == runs[1]


def test_hints_are_tried_right_after_the_default() -> None:
    legal = LARGE.legal(PROBLEM, LIMITS)
    hints = (legal[77], legal[300])
    search = search_of(LARGE, 24, hints=hints)
    assert search.sure() == [legal[0], *hints]
    assert [search.ask() for _ in range(3)] == [legal[0], *hints]
    assert search.sure() == []


def test_a_failure_is_told_as_a_constraint_and_never_wins() -> None:
    import optuna

    search = search_of(LARGE, 24)
    for index in range(16):
        variant = search.ask()
        assert variant is not None
        search.tell(variant, None if index % 2 else 1.0 + index)
    assert search.best is not None
    assert search.best.cost == 1.0
    trials = search._study.trials
    failed = [t for t in trials if t.constraints.get("failed")]
    assert len(failed) >= 8
    assert all(t.state == optuna.trial.TrialState.COMPLETE for t in failed)


def test_stored_measurements_count_and_points_of_another_space_do_not() -> None:
    search = search_of(LARGE, 24)
    legal = LARGE.legal(PROBLEM, LIMITS)
    other = family("sim.large", {f"p{i}": tuple(range(9)) for i in range(4)})
    search.learn(legal[5], 0.25)
    search.learn(legal[6], None)
    search.learn(other.legal(PROBLEM, LIMITS)[-1], -9.0)
    assert search.attempts == 2
    assert search.best is not None
    assert search.best.variant == legal[5]
    asked = {search.ask() for _ in range(20)}
    assert not asked & {legal[5], legal[6]}
    assert {t.values[0] for t in search._study.trials if t.values} == {0.25, 0.0}


def test_a_small_space_is_walked_without_loading_optuna() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "import test_tuning_search as t\n"
        "small = t.family('sim.small', {'p0': (1, 2, 3)})\n"
        "search = t.search_of(small, 3)\n"
        "assert len([search.ask() for _ in range(4) if search.remaining]) == 3\n"
        "assert 'optuna' not in sys.modules"
    )
    root = str(__import__("pathlib").Path(__file__).parent.parent)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)


def test_trials_are_shared_and_a_hopeless_family_gets_only_its_first_share() -> None:
    fast = family("sim.fast", {f"p{i}": tuple(range(5)) for i in range(3)})
    slow = family("sim.slow", {f"p{i}": tuple(range(5)) for i in range(3)})
    search = BucketSearch([search_of(fast, 40), search_of(slow, 40)], 40)
    asked: list[Variant] = []
    while batch := search.ask(4):
        for variant in batch:
            search.tell(variant, 0.1 if variant.family is fast else 2.0)
        asked += batch
    names = [variant.family.name for variant in asked]
    assert len(names) == 40
    assert names[:2] == ["sim.fast", "sim.slow"]
    assert names.count("sim.slow") == 10
    assert search.over
    assert search.left == 0


def test_a_search_whose_trials_are_in_the_database_is_over() -> None:
    search = BucketSearch([search_of(LARGE, 8)], 8)
    for variant in LARGE.legal(PROBLEM, LIMITS)[:8]:
        search.learn(variant, 0.5)
    assert search.over
    assert search.ask(4) == []
