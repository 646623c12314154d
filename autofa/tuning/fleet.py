"""Several tunes on one server: they search each bucket together, and one of them decides it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autofa.bench.protocol import Outcome
from autofa.errors import StoreLockedError, StoreUnreachableError
from autofa.kernels.family import Variant
from autofa.problem import Problem, bucket_of
from autofa.store.advisory import Advisory
from autofa.store.reader import sqlite_path
from autofa.tuning.claims import Claims, FileClaims, ServerClaims
from autofa.tuning.control import Control
from autofa.tuning.events import Notice, OnEvent
from autofa.tuning.lab import Lab
from autofa.tuning.plan import BucketPlan, MakeSearch, standing
from autofa.tuning.recording import Surroundings, recorded
from autofa.tuning.records import cost, record
from autofa.tuning.request import TuneRequest
from autofa.tuning.saving import PATIENCE_S
from autofa.tuning.studies import MAX_DEATHS, JournalStudies, ServerStudies, Studies

if TYPE_CHECKING:
    from autofa.tuning.session import Session

Answer = TypeVar("Answer")

# Between looks whether others have measured what is left with them.
_POLL_S = 1.0


def join(request: TuneRequest, lab: Lab, stack: ExitStack) -> tuple[Claims, Studies | None]:
    """What keeps this tune and others apart, and where others see what it does.

    Raises:
        UsageError: the file to watch it in cannot be written.
    """
    if sqlite_path(request.db) is None:
        locks = stack.enter_context(Advisory(request.db))
        studies = stack.enter_context(ServerStudies(request.db, locks))
        return ServerClaims(locks, lab.device), studies
    claims = stack.enter_context(FileClaims(request.db, lab.device))
    if request.dashboard is None:
        return claims, None
    return claims, stack.enter_context(JournalStudies(Path(request.dashboard)))


def recorder(session: Session, studies: Studies) -> MakeSearch:
    """Makes the searches of a tune whose studies others see."""
    request, lab = session.request, session.lab

    def costs(problem: Problem) -> dict[str, float | None]:
        bucket = bucket_of(problem)
        if studies.shared:
            session.saver.flush()
            session.read(bucket)
        stands = standing(session.rows.get(bucket, []), problem, request, lab)
        return {slug: cost(row) for slug, (row, _) in stands.items()}

    def give_up(problem: Problem, variant: Variant) -> None:
        died = f"{MAX_DEATHS} workers died while they measured it"
        outcome = Outcome(variant.slug, "crashed", died)
        session.save([record(lab, problem, variant, outcome, run=uuid.uuid4().hex)])

    around = Surroundings(costs, lambda: not session.saver.unsaved, session.patiently, give_up)
    return partial(recorded, request=request, lab=lab, studies=studies, around=around)


def patiently(work: Callable[[], Answer], control: Control, emit: OnEvent) -> Answer:
    """Does something with a server, again and again while that is away.

    Raises:
        StoreUnreachableError: it was for 600 s.
        Stopped: the tune must not go on.
    """
    deadline = time.monotonic() + PATIENCE_S
    told = False
    while True:
        try:
            return work()
        except (StoreUnreachableError, StoreLockedError) as error:
            if time.monotonic() > deadline:
                raise
            if not told:
                emit(Notice(f"{error}; going on when it answers again, results are kept"))
            told = True
        control.check()
        time.sleep(_POLL_S)


class Fleet:
    """One tune's part in the work of all. Buckets are gone through round by round: whatever is to
    be asked for is measured; where nothing is left with anybody, whoever comes first plays the
    precise rounds over everybody's rows. Nobody waits for a bucket while another has work."""

    def __init__(self, session: Session, claims: Claims) -> None:
        self._session = session
        self._claims = claims

    def run(self, plans: Sequence[BucketPlan]) -> None:
        """Takes part until all of these are decided, by whoever."""
        todo = list(plans)
        waited = False
        while todo:
            worked = False
            for plan in tuple(todo):
                self._session.control.check()
                rest = [other for other in todo if other is not plan]
                before = self._session.measured
                if self._turn(plan, rest, len(plans)):
                    todo = rest
                    worked = True
                worked |= self._session.measured > before
            if not worked:
                if not waited:
                    self._session.emit(Notice("others are measuring what is left; waiting for it"))
                waited = True
                time.sleep(_POLL_S)

    def _turn(self, planned: BucketPlan, rest: Sequence[BucketPlan], total: int) -> bool:
        """Does what there is to do for one problem. Whether it is decided."""
        session, problem = self._session, planned.problem
        plan = session.plan_now(problem)
        if plan.done:
            session.settle(plan)
            return True
        if not plan.search.alone:
            free = plan.search.look()
            if not plan.search.over:
                if session.bucket(planned, rest, total, search_only=True):
                    return True
                plan = session.plan_now(problem)
                free = plan.search.look()
                if not plan.search.over and not session.was_cut(problem):
                    return False
            if not free:
                return False
        if not session.patiently(lambda: self._claims.take(problem)):
            return False
        try:
            return session.bucket(planned, rest, total)
        finally:
            self._claims.release(problem)
