"""Several tunes on one PostgreSQL server search the same buckets together; simulated."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from fleet_world import SHAPES, TRIALS, join, kill, searched, server_storage, trials, workers
from optuna.trial import TrialState
from tuning_simulation import DEVICE, LIMITS, Simulation, family
from tuning_world import BEST, ask, run, stored, times, winner

from autofa.store.advisory import Advisory
from autofa.tuning import studies
from autofa.tuning.lab import Lab
from autofa.tuning.recording import Surroundings, recorded
from autofa.tuning.request import TuneRequest
from autofa.tuning.session import tune

pytestmark = pytest.mark.postgres


def test_workers_share_the_trials_and_measure_nothing_twice(postgres_url: str) -> None:
    with workers(postgres_url, 4) as team:
        assert join(team) == [0, 0, 0, 0]
    measured = searched(postgres_url)
    assert len(measured) == TRIALS * len(SHAPES)
    assert set(measured.values()) == {1}
    vendors = Counter((r.problem, r.slug) for r in stored(postgres_url) if r.slug == "torch.sdpa")
    assert set(vendors.values()) == {1}, "one worker decides a bucket"
    with server_storage(postgres_url) as storage:
        told = trials(storage)
        found = storage.get_all_studies()
    assert {t.state for t in told} == {TrialState.COMPLETE}
    shares = Counter(t.user_attrs["worker"] for t in told)
    assert len(shares) == 4
    assert min(shares.values()) >= len(told) // 16, shares
    assert {t.user_attrs["kernel"] for t in told} == {slug for _, slug in measured}
    assert len(found) == 2 * len(SHAPES)
    assert {s.user_attrs["family"] for s in found} == {"sim.fast", "sim.slow"}
    assert all(s.user_attrs["device"] in s.study_name for s in found)
    assert [winner(postgres_url, p) for p in SHAPES] == [BEST] * len(SHAPES)
    sim = Simulation(lambda slug, problem: 1.0)
    assert run(sim, ask(postgres_url, SHAPES, trials=TRIALS)).exit_code == 0
    assert sim.timed == [], "a worker that comes late has nothing to do"


def test_what_a_killed_worker_was_measuring_is_measured_by_others(postgres_url: str) -> None:
    with workers(postgres_url, 4, first_hangs_after=2, grace_s=3) as found:
        assert found[0].hangs.wait(60)
        kill(found[0])
        assert join(found[1:]) == [0, 0, 0]
    measured = searched(postgres_url)
    assert len(measured) == TRIALS * len(SHAPES)
    assert set(measured.values()) == {1}
    with server_storage(postgres_url) as storage:
        told = trials(storage)
    retried = [t for t in told if t.system_attrs.get("retry_history")]
    assert retried
    assert {t.state for t in retried} == {TrialState.COMPLETE}
    assert {t.state for t in told} == {TrialState.COMPLETE, TrialState.FAIL}
    assert [winner(postgres_url, p) for p in SHAPES] == [BEST] * len(SHAPES)


def test_another_kind_of_device_is_tuned_for_itself(postgres_url: str) -> None:
    other = replace(DEVICE, name="Another CPU")
    sim = Simulation(lambda slug, problem: 1.0)

    @contextmanager
    def laboratory(request: TuneRequest) -> Iterator[Lab]:
        with sim.laboratory(request) as lab:
            yield replace(lab, device=other)

    run(Simulation(lambda slug, problem: 1.0), ask(postgres_url, trials=4))
    assert tune(ask(postgres_url, trials=4), laboratory=laboratory).exit_code == 0
    assert len({slug for slug, _ in sim.checked if slug.startswith("sim.")}) == 4
    with server_storage(postgres_url) as storage:
        devices = Counter(study.user_attrs["device"] for study in storage.get_all_studies())
    assert devices == {str(DEVICE): 2, str(other): 2}


def test_what_every_worker_dies_of_is_given_up(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "HEARTBEAT_S", 1)
    monkeypatch.setattr(studies, "GRACE_S", 1)
    deadly = family("sim.deadly", {"m": (1,)}).legal(SHAPES[0], LIMITS)
    given_up: list[str] = []
    around = Surroundings(
        costs=lambda problem: {},
        saved=lambda: True,
        patiently=lambda work: work(),
        give_up=lambda problem, variant: given_up.append(variant.slug),
    )
    asked = []
    for number in range(studies.MAX_DEATHS + 1):
        with (
            Simulation(times).laboratory(ask(postgres_url)) as lab,
            Advisory(postgres_url) as locks,
            studies.ServerStudies(postgres_url, locks) as place,
        ):
            place.worker = f"worker {number}"
            search = recorded(
                SHAPES[0], {"sim.deadly": deadly}, (), (),
                request=ask(postgres_url), lab=lab, studies=place, around=around,
            )  # fmt: skip
            asked += search.ask(8)
            assert search.over
        time.sleep(1.5)  # it is gone, and gives no sign of life
    assert asked == deadly * studies.MAX_DEATHS
    assert set(given_up) == {deadly[0].slug}


def test_rows_that_a_study_lacks_are_taken_into_it(postgres_url: str) -> None:
    """Another tune's or an import's; so are those of a tune with fewer trials."""
    run(Simulation(lambda slug, problem: 1.0), ask(postgres_url, trials=4))
    with server_storage(postgres_url) as storage:
        for study in storage.get_all_studies():
            storage.delete_study(study._study_id)
    sim = Simulation(lambda slug, problem: 1.0)
    run(sim, ask(postgres_url, trials=8))
    assert len(searched(postgres_url)) == 8
    assert set(searched(postgres_url).values()) == {1}
    with server_storage(postgres_url) as storage:
        told = trials(storage)
    assert {t.state for t in told} == {TrialState.COMPLETE}
    assert {t.user_attrs.get("kernel") for t in told} == {s for _, s in searched(postgres_url)}


def test_an_interrupted_worker_gives_back_what_it_did_not_measure(postgres_url: str) -> None:
    sim = Simulation(lambda slug, problem: 1.0)
    steps = iter(range(1000))

    def interrupt() -> None:
        if next(steps) == 3:
            raise KeyboardInterrupt

    sim.on_step = interrupt
    assert run(sim, ask(postgres_url, trials=TRIALS)).interrupted
    with server_storage(postgres_url) as storage:
        assert TrialState.RUNNING not in {t.state for t in trials(storage)}
    assert (
        run(Simulation(lambda slug, problem: 1.0), ask(postgres_url, trials=TRIALS)).exit_code == 0
    )
    assert len(searched(postgres_url)) == TRIALS
