"""A fleet whose server goes away and comes back; locks that live on it."""

from __future__ import annotations

import threading
import time

import pytest
from fleet_world import SHAPES, TRIALS, join, searched, stored, wait_for, workers
from postgres_server import Server
from tuning_simulation import Simulation
from tuning_world import BEST, ask, run, times, winner

from autofa.errors import StoreUnreachableError
from autofa.store import advisory
from autofa.store.advisory import Advisory
from autofa.store.repository import Repository
from autofa.tuning import fleet, session, studies

pytestmark = pytest.mark.postgres


def test_a_server_that_is_away_costs_no_result(postgres: Server, postgres_url: str) -> None:
    def begun() -> bool:
        with Repository.open(postgres_url, write=True) as repository:
            return len(repository.rows()) >= 8

    with workers(postgres_url, 2, step_s=0.05) as found:
        wait_for(begun)
        with postgres.away():
            time.sleep(3)
            assert all(worker.process.is_alive() for worker in found)
        assert join(found) == [0, 0]
        told = [text for worker in found for text in worker.told]
    assert any("results are kept" in text for text in told)
    assert not any("pa:ss" in text for text in told)
    measured = searched(postgres_url)
    assert len(measured) == TRIALS * len(SHAPES)
    assert set(measured.values()) == {1}
    assert [winner(postgres_url, p) for p in SHAPES] == [BEST] * len(SHAPES)


def test_where_it_stays_away_the_tune_ends_with_a_message_and_resumes(
    postgres: Server, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "PATIENCE_S", 1.0)
    monkeypatch.setattr(session, "PATIENCE_S", 1.0)
    monkeypatch.setattr(studies, "HEARTBEAT_S", 1)
    monkeypatch.setattr(studies, "GRACE_S", 2)
    sim = Simulation(times)
    stopped: list[bool] = []

    def stop() -> None:
        if len(sim.timed) >= 4 and not stopped:
            stopped.append(True)
            postgres.stop()

    sim.on_step = stop
    try:
        with pytest.raises(StoreUnreachableError, match="check that the server runs") as caught:
            run(sim, ask(postgres_url))
        assert "pa:ss" not in str(caught.value)
    finally:
        postgres.start()
    before = len(stored(postgres_url))
    assert before > 0
    rest = Simulation(times)
    assert run(rest, ask(postgres_url)).exit_code == 0
    assert set(searched(postgres_url).values()) == {1}
    assert winner(postgres_url, SHAPES[0]) == BEST


def test_locks_die_with_their_connection_and_are_taken_again_after_a_restart(
    postgres: Server, postgres_url: str
) -> None:
    with Advisory(postgres_url) as one, Advisory(postgres_url) as other:
        assert one.take("a")
        assert not other.take("a")
        with postgres.away(), pytest.raises(StoreUnreachableError):
            other.take("a")
        assert one.take("b"), "the server is back"
        assert not other.take("a")
        one.release("a")
        assert other.take("a")
        assert not other.take("b")
    with Advisory(postgres_url) as third:
        assert third.take("a")
        assert third.take("b")


def test_one_at_a_time_holds_a_lock_and_nobody_waits_for_ever(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advisory, "_PATIENCE_S", 1)
    inside = 0

    def count() -> None:
        nonlocal inside
        with Advisory(postgres_url) as locks:
            for _ in range(20):
                with locks.hold("ask"):
                    inside += 1
                    assert inside == 1
                    time.sleep(0.001)
                    inside -= 1

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Advisory(postgres_url) as one, Advisory(postgres_url) as other, one.hold("ask"):
        with pytest.raises(StoreUnreachableError, match="lock timeout"), other.hold("ask"):
            pass
        assert other.take("another")
