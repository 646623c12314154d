"""benchmarks/sweep.py: what is recorded comes back, and strategies are compared on it fairly."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuning_simulation import PROBLEM, Simulation, family

from autofa.tuning.strategies import DEFAULT, Known, nearest_to_best

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sweep_files
    import sweep_record
    import sweep_replay

    return SimpleNamespace(files=sweep_files, record=sweep_record, replay=sweep_replay)


def recordings(sweep: SimpleNamespace) -> list[Path]:
    return sorted((BENCHMARKS / "sweeps").rglob("*.jsonl"))


def test_the_committed_recordings_are_whole_and_small(sweep: SimpleNamespace) -> None:
    found = sweep.files.read_all(BENCHMARKS / "sweeps")
    assert len({s.space.name for _, s in found if s.space.device == "cpu"}) >= 6
    for path, one in found:
        assert path.stem == one.space.name
        assert path.parent.name == one.space.device
        assert one.costs
        assert path.stat().st_size < 40_000
        assert not one.missing, path


def test_a_recording_that_was_cut_off_goes_on_where_it_stopped(
    sweep: SimpleNamespace, tmp_path: Path
) -> None:
    """In the middle of a line, as a killed process leaves it."""
    whole = recordings(sweep)[0]
    before = sweep.files.read(whole)
    cut = tmp_path / whole.name
    cut.write_text(whole.read_text()[:-15])
    part = sweep.files.read(cut)
    assert len(part.costs) == len(before.costs) - 1
    assert [v.slug for v in part.missing] == [list(before.costs)[-1]]


def test_a_recording_of_another_format_is_refused(sweep: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"format": 99}) + "\n")
    with pytest.raises(ValueError, match="got format 99"):
        sweep.files.read(path)


def test_recording_measures_each_point_once_and_notes_failures(
    sweep: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = family("sim.wide", {"m": (1, 2, 4), "n": (1, 2, 4, 8)})

    def times(slug: str, problem: object) -> float:
        variant = own.parse(slug)
        return 2.0 if variant is None else 0.5 + 0.1 * variant.params.m + 0.01 * variant.params.n

    broken = "sim.wide-mx2-nx4"
    sim = Simulation(times, check_fails={broken: "crashed"})
    space = sweep.files.Space("sim.wide", PROBLEM.shape, "f32", "none", "cpu")
    for module in (sweep.files, sweep.record):
        monkeypatch.setattr(module, "REGISTRY", __import__("tuning_simulation").registry(own))
    monkeypatch.setattr(sweep.record, "open_lab", sim.laboratory)

    def record() -> bool:
        done: bool = sweep.record.record(
            [space], tmp_path, "cpu", rounds=9, budget_s=None, build_only=False, tell=lambda t: None
        )
        return done

    assert record()
    one = sweep.files.read(tmp_path / f"{space.name}.jsonl")
    assert one.costs.pop(broken) is None
    assert len(one.costs) == 11
    for slug, cost in one.costs.items():
        assert math.exp(cost) == pytest.approx(times(slug, None) / 2.0, rel=1e-3)
    measured = len(sim.timed)
    assert record()
    assert len(sim.timed) == measured, "nothing is left to measure"


def test_every_trial_counts_and_the_budget_is_a_quarter_of_what_is_fair(
    sweep: SimpleNamespace,
) -> None:
    path = recordings(sweep)[0]
    field = sweep.replay.arena(path.stem, sweep.files.read(path), declared=False)
    fair = [
        c for c in field.sweep.costs.values() if c is not None and c <= field.best + math.log(5)
    ]
    assert field.trials == min(40, math.ceil(len(fair) / 4))
    trials = len(field.legal)
    curve = sweep.replay.curve(field, DEFAULT, 0, trials, 2, ())
    assert len(curve) == trials
    assert curve == sorted(curve)
    assert curve[0] == pytest.approx(math.exp(field.best - field.cost(field.legal[0])))
    assert curve[-1] == 1.0


def test_the_default_strategy_reaches_the_best_of_the_recordings_soon(
    sweep: SimpleNamespace,
) -> None:
    """98% in the median and 93% in nine of ten searches, and more than chance."""
    fields = [
        sweep.replay.arena(path.stem, sweep.files.read(path), declared=False)
        for path in recordings(sweep)
    ]
    reached, ahead = [], 0
    for field in fields:
        mine = [sweep.replay.curve(field, DEFAULT, s, field.trials, 8, ())[-1] for s in range(4)]
        chance = []
        for seed in range(20):
            rest = random.Random(seed).sample(field.legal[1:], field.trials - 1)
            costs = [c for v in rest if (c := field.cost(v)) is not None]
            best = min([*costs, field.cost(field.legal[0])])
            chance.append(math.exp(field.best - best))
        reached += mine
        mean = sum(mine) / len(mine)
        ahead += mean > sum(chance) / len(chance) or mean == 1.0
    reached.sort()
    assert reached[len(reached) // 2] >= 0.98
    assert reached[len(reached) // 10] >= 0.93
    assert ahead >= 0.8 * len(fields)


POINTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), unique=True, min_size=2)


@given(POINTS, st.data())
def test_a_strategy_names_an_open_point_or_none(
    points: list[tuple[int, int]], data: st.DataObject
) -> None:
    asked = data.draw(st.integers(1, len(points) - 1))
    running = data.draw(st.integers(0, asked))
    costs = {p: data.draw(st.none() | st.floats(-3, 3)) for p in points[: asked - running]}
    known = Known(costs, points[asked - running : asked], points[asked:])
    for choose in (nearest_to_best, DEFAULT.choose):
        assert choose(known, random.Random(0)) in {None, *known.open}


def test_the_nearest_is_one_parameter_away_before_two_and_up_before_down() -> None:
    costs = {(1, 1): 0.5, (3, 3): 0.1, (2, 3): None}
    chance = random.Random(0)

    def chosen(*open_: tuple[int, int]) -> object:
        return nearest_to_best(Known(costs, [], open_), chance)

    assert chosen((2, 2), (3, 1), (0, 0)) == (3, 1)
    assert chosen((3, 2), (3, 1), (4, 4)) == (3, 2)
    assert chosen((3, 2), (3, 4)) == (3, 4)
    assert chosen((0, 0), (2, 2)) == (2, 2)


def test_the_command_prints_its_table_and_refuses_unknown_samplers() -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        asked = [sys.executable, str(BENCHMARKS / "sweep.py"), "replay", *arguments]
        return subprocess.run(asked, capture_output=True, text=True, cwd=ROOT, timeout=120)

    done = command("--samplers", "random,nearest", "--seeds", "1")
    assert done.returncode == 0, done.stderr
    assert "| nearest" in done.stdout
    assert "chosen: nearest" in done.stdout
    wrong = command("--samplers", "luck")
    assert wrong.returncode == 2
    assert "got 'luck'" in wrong.stderr
