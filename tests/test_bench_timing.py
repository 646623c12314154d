"""The rounds, on simulated candidates and a simulated clock."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest

from autofa.bench.protocol import Plan
from autofa.bench.timing import Result, take_turns


class Simulated:
    """A candidate of a known time; each turn adds ten times that to the shared clock (in s)."""

    resolution_ms = 0.0

    def __init__(self, world: World, time_ms: float, call_ms: float | None = None) -> None:
        self.world, self.time_ms, self.call_ms = world, time_ms, call_ms or time_ms
        self.turns = 0

    def __call__(self) -> tuple[float, float]:
        self.turns += 1
        self.world.collecting |= gc.isenabled()
        self.world.now += self.time_ms * 0.01
        noise = self.world.noise(self.turns)
        return self.time_ms * noise, self.call_ms * noise


class World:
    def __init__(self, noise: Callable[[int], float] | None = None) -> None:
        generator = random.Random(3)
        self.now = 0.0
        self.collecting = False
        self.noise = noise or (lambda turn: generator.uniform(0.995, 1.005))

    def run(self, times: list[float], plan: Plan | None = None) -> tuple[Result, list[Simulated]]:
        turns = [Simulated(self, ms) for ms in times]
        plan = plan or Plan(budget_s=1e9)
        return take_turns(turns, 0, plan, lambda index: None, lambda: self.now), turns


def test_slow_candidates_leave_early_and_the_baseline_stays() -> None:
    result, turns = World().run([10.0, 1.0, 1.02, 1.7, 2.0, 50.0])
    assert turns[5].turns == 2
    assert turns[4].turns <= 5
    assert turns[3].turns <= 5
    assert turns[1].turns == turns[0].turns == result.rounds
    assert result.resolved
    medians = [timing.time_ms for timing in result.timings if timing]
    assert medians == pytest.approx([10.0, 1.0, 1.02, 1.7, 2.0, 50.0], rel=0.005)


def test_finalists_are_the_best_few() -> None:
    times = [1.0, *(1 + i / 50 for i in range(10, 0, -1))]
    result, turns = World().run(times, Plan(finalists=3, budget_s=1e9))
    stayed = [i for i, turn in enumerate(turns) if turn.turns == result.rounds]
    assert stayed == [0, 8, 9, 10]


def test_equal_candidates_are_resolved_as_equal() -> None:
    result, _ = World().run([1.0, 1.0, 1.0])
    assert result.resolved
    assert 15 <= result.rounds < 63


def test_noise_that_hides_the_order_is_said() -> None:
    generator = random.Random(5)
    world = World(lambda turn: generator.lognormvariate(0, 0.5))
    result, _ = world.run([1.0, 1.03, 0.97])
    assert not result.resolved
    timing = result.timings[1]
    assert timing is not None
    assert timing.samples == 63
    assert timing.time_spread > 0.05


def test_own_kernels_are_told_apart_by_device_time() -> None:
    """Their calls last as long as the host works on them, and that says nothing."""
    generator = random.Random(7)
    world = World()
    turns = [Simulated(world, 0.8, 1.8), *(Simulated(world, t, 1.0) for t in (0.9, 0.5, 0.52, 1.5))]
    call = Simulated.__call__

    class Noisy(Simulated):
        def __call__(self) -> tuple[float, float]:
            time_ms, call_ms = call(self)
            return time_ms, call_ms * generator.lognormvariate(0, 0.2)

    for turn in turns:
        turn.__class__ = Noisy
    plan = Plan(finalists=2, budget_s=1e9)
    result = take_turns(turns, 0, plan, lambda i: None, lambda: world.now, own=range(1, 5))
    assert result.resolved
    assert result.rounds < 30
    stayed = [i for i, turn in enumerate(turns) if turn.turns == result.rounds]
    assert stayed == [0, 2, 3]
    assert turns[4].turns <= 5


def test_disturbed_rounds_are_played_again_and_do_not_count() -> None:
    # Somebody else's work takes the cores in two rounds of five.
    world = World(lambda turn: 50.0 if turn % 5 in (0, 2) else 1.0 + turn % 3 / 1000)
    result, turns = world.run([1.0, 0.8, 0.9])
    for index, expected in ((0, 1.0), (1, 0.8), (2, 0.9)):
        timing, baseline = result.timings[index], result.baselines[index]
        assert timing is not None
        assert baseline is not None
        assert timing.time_ms == pytest.approx(expected, rel=0.01)
        assert timing.time_spread < 0.01
        assert timing.time_quantiles[1] < 1.1 * expected
        assert baseline.time_spread < 0.01
        assert timing.samples >= 15
    assert turns[0].turns == result.rounds > 20


def test_disturbed_rounds_end_too() -> None:
    world = World(lambda turn: 50.0 if turn % 5 in (0, 2) else 1.0)
    plan = Plan(screen_rounds=9, min_rounds=9, max_rounds=9, finalists=9, budget_s=1e9)
    result, _ = world.run([1.0] * 4, plan)
    assert result.rounds == 14
    assert all(timing is not None and timing.samples == 9 for timing in result.timings)
    # What is off in most rounds is nobody's disturbance.
    world = World(lambda turn: 50.0 if turn % 3 else 1.0)
    result, _ = world.run([1.0, 0.5], Plan(min_rounds=63, budget_s=1e9))
    assert result.rounds == 63


def test_rounds_without_cores_do_not_count_however_even_they_are() -> None:
    world = World()
    generator = random.Random(9)
    crowded = [generator.random() < 0.7 for _ in range(1000)]
    world.noise = lambda turn: 400.0 if crowded[turn] else 1.0

    def waited() -> float:
        # So long have threads waited: half of the time of every crowded round.
        return sum(2.0 for r in range(1, turns[0].turns + 1) if crowded[r])

    turns = [Simulated(world, ms) for ms in (1.0, 0.8)]
    plan = Plan(budget_s=1e9)
    result = take_turns(turns, 0, plan, lambda index: None, lambda: world.now, waited)
    baseline, own = result.timings
    assert baseline is not None
    assert own is not None
    assert baseline.time_ms == pytest.approx(1.0)
    assert own.time_ms == pytest.approx(0.8)
    assert result.waited == 0.0
    # And where no round is undisturbed, all count, and the share tells.
    world.noise = lambda turn: 1.0
    turns = [Simulated(world, ms) for ms in (1.0, 0.8)]
    result = take_turns(
        turns, 0, plan, lambda index: None, lambda: world.now, lambda: 0.009 * turns[0].turns
    )
    assert result.waited == pytest.approx(0.5)
    assert result.rounds == 126
    assert result.timings[0] is not None
    assert result.timings[0].samples == 126


def test_one_undisturbed_round_does_not_stand_for_all() -> None:
    world = World()
    turns = [Simulated(world, ms) for ms in (1.0, 0.8)]

    def waited() -> float:
        return 0.01 * max(turns[0].turns - 1, 0)  # in all rounds but the first

    plan = Plan(min_rounds=7, max_rounds=7, budget_s=1e9)
    result = take_turns(turns, 0, plan, lambda index: None, lambda: world.now, waited)
    assert [timing.samples for timing in result.timings if timing] == [result.rounds] * 2


def test_the_budget_ends_the_rounds() -> None:
    world = World()
    result, _ = world.run([100.0, 99.0], Plan(budget_s=10.0))
    assert result.rounds == 6  # 2 s each; the sixth passes the budget
    assert not result.resolved


def test_mode_decides_by_its_own_time() -> None:
    for mode, gone in (("eager", 2), ("graph", 1)):
        world = World()
        turns = [
            Simulated(world, 2.0, 2.0),
            Simulated(world, 9.0, 1.0),  # fast to call, slow on the device
            Simulated(world, 1.0, 9.0),
        ]
        plan = Plan(mode=mode, budget_s=1e9)
        result = take_turns(turns, 0, plan, lambda index: None, lambda: 0.0)
        assert turns[gone].turns < result.rounds
        assert turns[3 - gone].turns == result.rounds


def test_a_disturbed_first_round_neither_drops_the_best_nor_spoils_its_ratio() -> None:
    world = World(lambda turn: 100.0 if turn == 1 else 1.0)
    result, turns = world.run([1.0, 0.5, 5.0])
    assert turns[1].turns == result.rounds
    slow, baseline = result.timings[2], result.baselines[2]
    assert slow is not None
    assert baseline is not None
    assert baseline.time_ms / slow.time_ms == pytest.approx(0.2)


def test_ratios_follow_the_drift_of_common_rounds() -> None:
    # Everything becomes twice as slow after round 7; one candidate is there only before.
    world = World(lambda turn: 1.0 if turn <= 7 else 2.0)
    result, _ = world.run(
        [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], Plan(screen_rounds=7, finalists=1, budget_s=1e9)
    )
    for index, expected in ((1, 1.1), (5, 1.5)):
        own, baseline = result.timings[index], result.baselines[index]
        assert own is not None
        assert baseline is not None
        assert own.time_ms / baseline.time_ms == pytest.approx(expected)


def test_order_within_rounds_varies_and_repeats_with_the_seed() -> None:
    def orders(seed: int) -> list[int]:
        seen: list[int] = []
        world = World()
        turns = [Simulated(world, 1.0) for _ in range(4)]
        take_turns(turns, 0, Plan(seed=seed, budget_s=1e9), seen.append, lambda: 0.0)
        return seen

    first = orders(0)
    assert first == orders(0)
    rounds = {tuple(first[i : i + 4]) for i in range(0, len(first) - 3, 4)}
    assert len(rounds) > 3


def test_no_garbage_collection_while_turns_run() -> None:
    world = World()
    world.run([1.0, 1.1])
    assert not world.collecting
    assert gc.isenabled()
