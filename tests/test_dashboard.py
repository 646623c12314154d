"""`tune --dashboard FILE`: the search of one machine in a journal that Optuna's dashboard reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_world import trials
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import TrialState
from tuning_simulation import Simulation
from tuning_world import PROBLEMS, ask, run, stored, times

from autofa.cli import _run
from autofa.errors import UsageError
from autofa.tuning.request import make_request


def measured(db: str) -> list[tuple[str, str, float | None]]:
    return [(row.slug, row.status, row.time_ms) for row in stored(db)]


@pytest.mark.parametrize("count", [12, 6])
def test_a_watched_tune_measures_what_an_unwatched_one_does(tmp_path: Path, count: int) -> None:
    """Whether the space is walked or sampled."""
    journal = tmp_path / "watch me.log"
    dbs = [str(tmp_path / name) for name in ("watched.db", "unwatched.db")]
    for db, dashboard in zip(dbs, (str(journal), None), strict=True):
        run(Simulation(times), ask(db, PROBLEMS[:2], trials=count, dashboard=dashboard))
    assert measured(dbs[0]) == measured(dbs[1])
    storage = JournalStorage(JournalFileBackend(str(journal)))
    told = trials(storage)
    assert {t.state for t in told} == {TrialState.COMPLETE}
    assert len(told) == 2 * count
    own = {slug for slug, _, _ in measured(dbs[0]) if slug.startswith("sim.")}
    assert {t.user_attrs["kernel"] for t in told} == own
    assert "m of 1, 2, 4" in told[0].params
    names = {study.study_name for study in storage.get_all_studies()}
    assert len(names) == 4
    assert any("1,8,128,64 f32 causal" in name and "sim.slow" in name for name in names)


def test_what_an_old_journal_holds_decides_nothing(tmp_path: Path) -> None:
    """The rows of another database, and what a killed tune was measuring."""
    journal, steps = str(tmp_path / "journal"), iter(range(1000))
    killed = Simulation(times)

    def die() -> None:
        if next(steps) == 6:
            raise SystemExit

    killed.on_step = die
    with pytest.raises(SystemExit):
        run(killed, ask(str(tmp_path / "old.db"), dashboard=journal))
    fresh = str(tmp_path / "new.db")
    assert run(Simulation(times), ask(fresh, dashboard=journal)).exit_code == 0
    assert len({slug for slug, _, _ in measured(fresh) if slug.startswith("sim.")}) == 12
    told = trials(JournalStorage(JournalFileBackend(journal)))
    assert TrialState.RUNNING not in {t.state for t in told}


def test_what_cannot_be_watched_is_said_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "postgresql://u@127.0.0.1:1/db"
    with pytest.raises(UsageError, match="optuna-dashboard URL"):
        make_request(device="cpu", db=url, dashboard="file")
    lost = str(tmp_path / "no folder" / "file")
    code = _run(["tune", "--device", "cpu", "--shape", "1,1,1,8", "--dashboard", lost])
    assert code == 2
    assert "a writable file" in capsys.readouterr().err
