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


def cubes(*names: str) -> list[KernelFamily]:
    return [family(f"sim.{name}", {f"p{i}": tuple(range(5)) for i in range(3)}) for name in names]


def run(search: BucketSearch, cost: Callable[[Variant], float], batch_size: int = 4) -> list[str]:
    """The families in the order in which their variants were measured."""
    asked: list[Variant] = []
    while batch := search.ask(batch_size):
        for variant in batch:
            search.tell(variant, cost(variant))
        asked += batch
    return [variant.family.name for variant in asked]


def test_trials_are_shared_by_how_far_a_family_is_behind() -> None:
    own = cubes("fast", "near", "slow", "slowest")
    level = {"sim.fast": 0.0, "sim.near": 0.3, "sim.slow": 0.5, "sim.slowest": 0.8}
    rising = iter(range(1000))
    search = BucketSearch([search_of(each, 40) for each in own], 40)
    names = run(search, lambda v: level[v.family.name] - 1e-4 * next(rising))
    assert len(names) == 40
    assert names[:4] == list(level)
    assert names.count("sim.slowest") == 1
    assert names.count("sim.slow") == 5  # its share of half the trials
    assert names.count("sim.near") > 10
    assert search.over
    assert search.left == 0


@pytest.mark.parametrize(("cost", "trials"), [(1.0, 1), (0.6, 10)])
def test_families_known_to_be_behind_get_more_than_one_trial_only_if_they_are_not(
    cost: float, trials: int
) -> None:
    own = cubes("fast", "other")
    search = BucketSearch([search_of(each, 40) for each in own], 40, behind={"sim.other"})
    names = run(search, lambda v: cost if v.family is own[1] else 0.0, batch_size=20)
    assert names[:20].count("sim.other") == 1
    assert names.count("sim.other") == trials


def test_a_search_ends_once_all_around_the_best_is_known() -> None:
    def make() -> BucketSearch:
        return BucketSearch([search_of(each, 200) for each in (LARGE, *cubes("a", "b", "c"))], 200)

    search = make()
    run(search, lambda v: bowl(v.params) if v.family is LARGE else 7.0)
    large = search._searches[0]
    assert 25 <= large.attempts < 80
    assert large.best is not None
    assert large.best.cost == min(bowl(v.params) for v in LARGE.legal(PROBLEM, LIMITS))
    # What it knows ends it, not the order in which it came to know it.
    again = make()
    told = [(each, slug, cost) for each in search._searches for slug, cost in each._costs.items()]
    random.Random(0).shuffle(told)
    for each, slug, cost in told:
        again.learn(each._legal[slug], cost)
    assert again.over


def test_a_search_whose_trials_are_in_the_database_is_over() -> None:
    search = BucketSearch([search_of(LARGE, 8)], 8)
    for variant in LARGE.legal(PROBLEM, LIMITS)[:8]:
        search.learn(variant, 0.5)
    assert search.over
    assert search.ask(4) == []
