"""Order statistics: coverage of the interval, quantiles, paired comparison."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofa.bench.stats import compare, interval, median_ranks, quantile, summarize


@pytest.mark.parametrize("count", [6, 7, 15, 31, 63])
def test_ranks_enclose_the_median_with_95_percent_and_no_narrower_pair_does(count: int) -> None:
    def coverage(low: int) -> float:
        outside = sum(math.comb(count, k) for k in range(low + 1))
        return 1 - 2 * outside / 2**count

    low, high = median_ranks(count)
    assert high == count - 1 - low
    assert coverage(low) >= 0.95
    assert coverage(low + 1) < 0.95


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    generator = random.Random(1)
    hits = 0
    for _ in range(2000):
        low, high = interval([generator.lognormvariate(0, 1) for _ in range(21)])
        hits += low <= 1 <= high
    assert 0.94 < hits / 2000 < 0.985


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=80))
def test_summary_is_ordered_and_positive(samples: list[float]) -> None:
    found = summarize(samples)
    assert min(samples) <= found.p10 <= found.median <= found.p90 <= max(samples)
    assert found.spread >= 0


def test_few_samples_promise_little_and_the_clock_sets_a_floor() -> None:
    assert summarize([1.0]).spread == 0.5
    assert summarize([1.0] * 5).spread == pytest.approx(0.1)
    assert summarize([1.0] * 31).spread == 0
    assert summarize([1.0] * 31, resolution=0.02).spread == pytest.approx(0.01)


def test_one_outlier_moves_neither_median_nor_spread() -> None:
    calm = summarize([1.0, 1.01] * 10)
    disturbed = summarize([1.0, 1.01] * 10 + [500.0])
    assert disturbed.median == pytest.approx(calm.median, rel=0.01)
    assert disturbed.spread < 0.02


def test_quantile_interpolates() -> None:
    assert quantile([1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.5) == 1.5
    assert quantile([7.0], 0.9) == 7.0


def test_pairs_are_told_apart_though_drift_hides_them() -> None:
    generator = random.Random(2)
    leader, slower, twin = [], [], []
    for turn in range(31):
        drift = 1 + 0.5 * math.sin(turn / 5)
        leader.append(drift * generator.uniform(0.999, 1.001))
        slower.append(1.03 * drift * generator.uniform(0.999, 1.001))
        twin.append(drift * generator.uniform(0.999, 1.001))
    assert compare(slower, leader, 0.01) == "slower"
    assert compare(leader, slower, 0.01) == "faster"
    assert compare(twin, leader, 0.01) == "equal"
    assert compare(slower[:5], leader[:5], 0.01) == "open"
