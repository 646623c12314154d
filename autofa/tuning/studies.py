"""Where studies live that others see: a server that several tunes share, or a file to watch one."""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from autofa.errors import StoreError, StoreUnreachableError, UsageError, explain_bad
from autofa.store.advisory import Advisory
from autofa.store.engines import translated
from autofa.store.urls import CONNECT_TIMEOUT, driver_url, no_answer
from autofa.tuning.search import quiet_optuna

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

# Seconds between a worker's signs of life, and after the last of which it passes for dead: more
# than a server takes to be restarted.
HEARTBEAT_S = 10
GRACE_S = 60
# A variant that was with so many workers as they died is not tried on another.
MAX_DEATHS = 3
# The attribute of a trial that names who measures it. Set last: what lacks it has lost its asker.
WORKER = "worker"
_TABLES = "autofa: tables of the studies"


class Studies:
    """Optuna's storage of a tune. Use from one thread.

    Attributes:
        shared: whether other processes ask the same studies.
        worker: what this process is called in them.
    """

    shared = False

    def __init__(self) -> None:
        self.worker = f"{socket.gethostname()}:{os.getpid()}"

    def __enter__(self) -> Studies:
        return self

    def __exit__(self, *error: object) -> None:
        """Lets go of everything."""

    @property
    def _storage(self) -> optuna.storages.BaseStorage:
        raise NotImplementedError

    def open(
        self, name: str, about: Mapping[str, str], sampler: optuna.samplers.BaseSampler
    ) -> optuna.Study:
        """The study of this name, made where it is not there; `about` says to people what it is."""
        import optuna

        with self.answering():
            study = optuna.create_study(
                storage=self._storage, study_name=name, sampler=sampler, load_if_exists=True
            )
            if not study.user_attrs:
                for key, text in about.items():
                    study.set_user_attr(key, text)
        return study

    def answering(self) -> AbstractContextManager[None]:
        """Within it, what Optuna says of a storage that fails is raised as a `StoreError`."""
        raise NotImplementedError

    def lock(self, name: str) -> AbstractContextManager[None]:
        """Keeps others of this name out while the block runs."""
        return nullcontext()

    def alive(self, trial: optuna.Trial) -> None:
        """This process measures it from now on."""

    def ended(self, trial: optuna.Trial) -> None:
        """It does not any more."""

    def bury(self, study: optuna.Study) -> None:
        """Gives the trials of workers that died to be asked for again."""


class ServerStudies(Studies):
    """On a PostgreSQL server, beside the measurements; Optuna's tables have names of their own."""

    shared = True

    def __init__(self, location: str, locks: Advisory) -> None:
        super().__init__()
        self._location = location
        self._locks = locks
        self._alive: dict[int, None] = {}
        self._missed = -float("inf")
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if "_backend" in self.__dict__:
            self._backend.remove_session()
            self._backend.engine.dispose()

    @cached_property
    def _backend(self) -> optuna.storages.RDBStorage:
        import optuna

        quiet_optuna()
        with (
            warnings.catch_warnings(),
            self._locks.hold(_TABLES),
            translated(self._locks.where, self._locks.url),
        ):
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.storages.RDBStorage(
                # Optuna fills in what is in braces.
                driver_url(self._location).replace("{", "%7B").replace("}", "%7D"),
                engine_kwargs={
                    "pool_pre_ping": True,
                    "connect_args": {"connect_timeout": CONNECT_TIMEOUT},
                },
                heartbeat_interval=HEARTBEAT_S,
                grace_period=GRACE_S,
                heartbeat_stale_trial_callback=_retry,
            )

    @cached_property
    def _storage(self) -> optuna.storages.BaseStorage:
        import optuna

        return optuna.storages.get_storage(self._backend)

    @contextmanager
    def answering(self) -> Iterator[None]:
        import optuna

        try:
            with (
                warnings.catch_warnings(),
                translated(self._locks.where, self._locks.url),
            ):
                # That ask and tell come without heartbeats: they are ours.
                warnings.filterwarnings("ignore", message="Heartbeat of storage")
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                yield
        except optuna.exceptions.UpdateFinishedTrialError:
            got = "a trial that another process ended meanwhile"
            do = "try again: a restart of the server cost the lock that prevents it"
            raise StoreUnreachableError(
                explain_bad(f"studies of {self._locks.where}", got, "one asker at a time", do)
            ) from None
        except optuna.exceptions.StorageInternalError as error:
            self._missed = time.monotonic()
            self._backend.remove_session()
            cause = getattr(error.__cause__, "orig", None) or error.__cause__ or error
            secrets = (self._locks.url.password or "",)
            raise no_answer(self._locks.where, cause, secrets, away=True) from None

    def lock(self, name: str) -> AbstractContextManager[None]:
        return self._locks.hold(name)

    def alive(self, trial: optuna.Trial) -> None:
        self._backend.record_heartbeat(trial._trial_id)
        self._alive[trial._trial_id] = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="autofa-alive", daemon=True)
            self._thread.start()

    def ended(self, trial: optuna.Trial) -> None:
        self._alive.pop(trial._trial_id, None)

    def bury(self, study: optuna.Study) -> None:
        import optuna

        # While the server was away nobody could give a sign of life.
        if time.monotonic() - self._missed > GRACE_S:
            optuna.storages.fail_stale_trials(study)

    def _beat(self) -> None:
        import optuna

        while not self._over.wait(HEARTBEAT_S):
            for number in tuple(self._alive):
                try:
                    self._backend.record_heartbeat(number)
                except optuna.exceptions.StorageInternalError:
                    self._missed = time.monotonic()
        self._backend.remove_session()


def _retry(study: optuna.Study, trial: FrozenTrial) -> None:
    """Gives the trial of a dead worker to the next that asks, under nobody's name."""
    from optuna.storages import RetryHeartbeatStaleTrialCallback

    trial.user_attrs = {k: v for k, v in trial.user_attrs.items() if k != WORKER}
    RetryHeartbeatStaleTrialCallback(max_retry=MAX_DEATHS - 1)(study, trial)


class JournalStudies(Studies):
    """In a file that `optuna-dashboard` shows; whatever it holds decides nothing."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            UsageError: it cannot be written.
        """
        super().__init__()
        self._path = path
        try:
            path.touch()
        except OSError as error:
            do = "name a file in a folder that you can write"
            raise UsageError(
                explain_bad("dashboard file", str(path), "a writable file", f"{error}; {do}")
            ) from None

    @cached_property
    def _storage(self) -> optuna.storages.BaseStorage:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        quiet_optuna()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return JournalStorage(JournalFileBackend(str(self._path)))

    @contextmanager
    def answering(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError) as error:
            do = "leave --dashboard, or name a new file"
            raise StoreError(
                explain_bad(f"dashboard file {self._path}", str(error), "a journal of Optuna's", do)
            ) from error
