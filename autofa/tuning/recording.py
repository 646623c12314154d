"""Searches whose studies live where others see them, and where several tunes may ask them.

What is measured is told by the database's rows alone; a study adds what is being measured. Asking
is done by one process at a time, so that each point is given once.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from autofa.device import DeviceKey
from autofa.errors import StoreError
from autofa.kernels.family import Variant
from autofa.problem import Problem
from autofa.tuning.lab import Lab
from autofa.tuning.request import TuneRequest
from autofa.tuning.search import BucketSearch, FamilySearch
from autofa.tuning.strategies import Point
from autofa.tuning.studies import MAX_DEATHS, WORKER, Studies

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

Answer = TypeVar("Answer")

_GIVEN_BACK = "given back"
# Of what is left, each asker takes its part of so many; late batches are small, so that the last
# worker is not waited for long. One kernel per batch would time plain SDPA as often as kernels.
_PARTS = 4
_LEAST = 2


@dataclass(frozen=True)
class Surroundings:
    """What a recorded search needs from its tune.

    Attributes:
        costs: slug -> cost of what is measured by now, None for what failed.
        saved: whether the database has every row of this process.
        patiently: does something with a server until it is done, or raises.
        give_up: records a variant as failed with which several workers died.
    """

    costs: Callable[[Problem], Mapping[str, float | None]]
    saved: Callable[[], bool]
    patiently: Callable[[Callable[[], Answer]], Answer]
    give_up: Callable[[Problem, Variant], None]


def describe(device: DeviceKey, problem: Problem, family: str, mode: str) -> dict[str, str]:
    """What a study is of, for people."""
    return {
        "device": str(device),
        "shape": str(problem.shape),
        "dtype": problem.dtype,
        "mask": problem.mask,
        "mode": mode,
        "family": family,
        "cost": "log(time / plain SDPA's in the same rounds): below 0 is faster",
    }


def study_name(about: Mapping[str, str], legal: Sequence[Variant], lab: Lab) -> str:
    """Readable, and another wherever points would not be the same or their costs not comparable."""
    first = legal[0]
    space = [(param.name, param.values) for param in first.family.params]
    versions = (lab.today.torch, lab.today.driver, lab.today.compiler)
    source = lab.fingerprint(first, first.target(lab.limits))
    key = (lab.device, space, [variant.slug for variant in legal], source, versions)
    digest = hashlib.sha256(repr((key, sorted(about.items()))).encode()).hexdigest()[:10]
    what = " ".join(about[name] for name in ("shape", "dtype", "mask", "mode"))
    return f"{about['device']} | {what} | {about['family']} | {digest}"


class RecordedSearch(FamilySearch):
    """A family's search in a study of `Studies`. `refresh` and `ask` are called under its lock."""

    def __init__(
        self,
        legal: Sequence[Variant],
        hints: Sequence[Variant],
        *,
        trials: int,
        studies: Studies,
        name: str,
        about: Mapping[str, str],
    ) -> None:
        # Workers whose chances were the same would all draw the same points.
        seed = zlib.crc32(studies.worker.encode()) if studies.shared else 0
        super().__init__(legal[0].family, legal, hints, trials=trials, seed=seed)
        self._studies = studies
        self._name = name
        self._about = about
        self._owed: list[str] = []
        self._waiting = 0
        self._untold: list[tuple[int, str]] = []
        self.others: frozenset[str] = frozenset()

    @cached_property
    def _labels(self) -> tuple[str, ...]:
        # A parameter is an index, for the samplers; so that people see of what, its name says it.
        return tuple(
            f"{param.name} of {', '.join(map(str, param.values))}" for param in self.family.params
        )

    def _open_study(self) -> optuna.Study:
        return self._studies.open(self._name, self._about, self._strategy.sampler(self._seed))

    def refresh(self, costs: Mapping[str, float | None]) -> list[Variant]:
        """Takes over what is measured and what others are measuring. Returns variants that several
        workers died with: they are closed, and their failure is to be recorded."""
        from optuna.trial import TrialState

        self._studies.bury(self._study)
        recorded: set[str] = set()
        running: dict[str, object] = {}
        numbers: dict[str, int] = {}
        deaths: set[str] = set()
        self._waiting = 0
        for trial in self._study.get_trials(deepcopy=False):
            slug = self._slug_of(trial.params) if trial.params.keys() == self._space.keys() else ""
            if trial.state == TrialState.WAITING:
                self._waiting += 1
            elif trial.state == TrialState.RUNNING:
                worker = trial.user_attrs.get(WORKER)
                if worker is None or not (self._studies.shared or worker == self._studies.worker):
                    self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
                elif slug:
                    running[slug] = worker
                    numbers[slug] = trial.number
            elif not slug:
                continue
            elif trial.state == TrialState.COMPLETE:
                recorded.add(slug)
            elif _died_for_good(trial):
                deaths.add(slug)
        self._costs = {slug: costs[slug] for slug in self._legal if slug in costs}
        for slug in self._costs.keys() - recorded - running.keys():
            self._add(self._study, slug, self._costs[slug])
        mine = self._studies.worker
        self._running = {s: t for s, t in self._running.items() if running.get(s) == mine}
        unsaid = running.keys() & self._costs.keys() - self._running.keys()
        self._untold = [(numbers[slug], slug) for slug in sorted(unsaid)]
        self.others = frozenset(running.keys() - self._running.keys() - self._costs.keys())
        given_up = sorted(deaths - self._costs.keys() - running.keys())
        self._costs |= dict.fromkeys(given_up)
        self._asked = {*self._costs, *running} & self._legal.keys()
        return [self._legal[slug] for slug in given_up]

    @property
    def waiting(self) -> bool:
        return self._waiting > 0

    def ask(self) -> Variant | None:
        while self._waiting:
            found = self._retried()
            if found is not None:
                return self._hand_out(*found)
        if not self.remaining:
            return None
        slug = self._sample()
        return self._hand_out(slug, self._running.pop(slug))

    def _retried(self) -> tuple[str, optuna.Trial] | None:
        """The next trial that waits, if it is still to be measured."""
        import optuna

        self._waiting -= 1
        trial = self._study.ask(dict(self._space))
        slug = self._slug_of(trial.params)
        if slug is not None and slug in self._costs:  # a dead worker's, which had measured it
            self._finish(trial, self._costs[slug])
        elif slug is None or slug in self._asked:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
        else:
            return slug, trial
        return None

    def tidy(self) -> None:
        """Tells for workers that died in between what they had measured. For people only."""
        import optuna

        fail = optuna.trial.TrialState.FAIL
        for number, slug in self._untold:
            cost = self._costs[slug]
            state = fail if cost is None else None
            self._study.tell(number, cost, state=state, skip_if_finished=True)
        while self._waiting:
            found = self._retried()
            if found is not None:
                self._study.tell(found[1], state=fail, skip_if_finished=True)

    def _hand_out(self, slug: str, trial: optuna.Trial) -> Variant:
        for key, text in self._told_of(slug).items():
            if trial.user_attrs.get(key) != text:
                trial.set_user_attr(key, text)
        self._studies.alive(trial)
        trial.set_user_attr(WORKER, self._studies.worker)
        self._running[slug] = trial
        self._asked.add(slug)
        return self._legal[slug]

    def _told_of(self, slug: str) -> dict[str, str]:
        values = zip(self.family.params, self._legal[slug].values, strict=True)
        return {"kernel": slug, "values": ", ".join(f"{p.name}={v}" for p, v in values)}

    def _propose(self, point: Point) -> None:
        import optuna

        # In one transaction, where `enqueue_trial` would leave a few for each parameter to `ask`.
        self._study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.WAITING,
                params=self._named(point),
                distributions=dict(self._space),
                user_attrs=self._told_of(self._slug_at(point)),
            )
        )

    def _by_chance(self, slug: str) -> str:
        self._propose(self._points[slug])
        self._running[slug] = self._study.ask(dict(self._space))
        return slug

    def tell(self, variant: Variant, cost: float | None) -> None:
        self._costs[variant.slug] = cost
        self._owed.append(variant.slug)

    def pay(self) -> None:
        """Tells the study what was told here. The rows must be in the database by now."""
        while self._owed:
            slug = self._owed[0]
            trial = self._running.get(slug)
            if trial is not None:
                self._finish(trial, self._costs[slug])
                self._studies.ended(self._running.pop(slug))
            self._owed.pop(0)

    def skip(self, variant: Variant) -> None:
        import optuna

        trial = self._running.pop(variant.slug, None)
        self._asked.discard(variant.slug)
        if trial is not None:
            self._studies.ended(trial)
            trial.set_user_attr(_GIVEN_BACK, True)
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)

    def _finish(self, trial: optuna.Trial, cost: float | None) -> None:
        import optuna

        # Somebody who held this worker for dead may have ended the trial.
        with suppress(optuna.exceptions.UpdateFinishedTrialError):
            if cost is None:
                trial.set_constraint("failed", 1.0)
            value = 0.0 if cost is None else cost
            self._study.tell(trial, value, skip_if_finished=True)

    def leave(self) -> None:
        """Gives back what was asked for and is not measured."""
        for slug in tuple(self._running):
            if slug not in self._owed:
                self.skip(self._legal[slug])


def _died_for_good(trial: FrozenTrial) -> bool:
    history = trial.system_attrs.get("retry_history", ())
    return (
        len(history) >= MAX_DEATHS - 1
        and trial.user_attrs.keys() >= {WORKER}
        and (_GIVEN_BACK not in trial.user_attrs)
    )


class RecordedBucketSearch(BucketSearch):
    """The recorded searches of one problem. Several processes ask by turns."""

    def __init__(
        self,
        problem: Problem,
        searches: Sequence[RecordedSearch],
        trials: int,
        studies: Studies,
        around: Surroundings,
        lock: str,
        behind: Collection[str] = (),
    ) -> None:
        super().__init__(searches, trials, behind)
        self.alone = not studies.shared
        self._problem = problem
        self._recorded = tuple(searches)
        self._studies = studies
        self._around = around
        self._lock = lock
        self._given: list[Variant] = []

    def ask(self, count: int) -> list[Variant]:
        return self._around.patiently(lambda: self._ask(count))

    def _ask(self, count: int) -> list[Variant]:
        with self._studies.lock(self._lock), self._studies.answering():
            self._refresh()
            if self._studies.shared:
                count = min(count, max(_LEAST, math.ceil(self.left / _PARTS)))
            while len(self._given) < count and not self.over:
                search = self._next()
                variant = search.ask() if search is not None else None
                if variant is not None:
                    self._given.append(variant)
        given, self._given = self._given, []
        return given

    def look(self) -> bool:
        return self._around.patiently(self._look)

    def _look(self) -> bool:
        with self._studies.lock(self._lock), self._studies.answering():
            self._refresh()
            free = not any(search.others for search in self._recorded)
            if free and self.over:
                for search in self._recorded:
                    search.tidy()
        return free

    def _refresh(self) -> None:
        costs = self._around.costs(self._problem)
        for search in self._recorded:
            for variant in search.refresh(costs):
                self._around.give_up(self._problem, variant)
            search.pay()

    def skip(self, variant: Variant) -> None:
        with suppress(StoreError), self._studies.answering():
            super().skip(variant)

    def close(self) -> None:
        """One attempt: what stays with this process is given to others when it passes for dead."""
        for search in self._recorded:
            with suppress(StoreError), self._studies.answering():
                if self._around.saved():
                    search.pay()
                search.leave()


def recorded(
    problem: Problem,
    legal: Mapping[str, Sequence[Variant]],
    near: Sequence[Variant],
    behind: Collection[str],
    *,
    request: TuneRequest,
    lab: Lab,
    studies: Studies,
    around: Surroundings,
) -> RecordedBucketSearch:
    """The search for one problem in `studies`."""
    searches = []
    for family, found in legal.items():
        about = describe(lab.device, problem, family, request.mode)
        searches.append(
            RecordedSearch(
                found,
                [variant for variant in near if variant.family.name == family],
                trials=request.trials,
                studies=studies,
                name=study_name(about, found, lab),
                about=about,
            )
        )
    lock = f"autofa: {lab.device!r} {problem!r} {request.mode}"
    return RecordedBucketSearch(problem, searches, request.trials, studies, around, lock, behind)
