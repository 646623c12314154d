"""One tune: every requested problem, the most valuable first, into the database."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace

from autofa.bench import memory
from autofa.bench.client import NoRoomError
from autofa.errors import LaunchError, StoreLockedError, StoreUnreachableError, UsageError
from autofa.problem import Bucket, Problem, bucket_of
from autofa.store.ranking import is_valid, validity
from autofa.store.repository import Repository
from autofa.store.rows import Row
from autofa.store.seeds import read_seed
from autofa.tuning.bucket import BucketRun, answer
from autofa.tuning.claims import Claims
from autofa.tuning.control import Control, Interrupted, Stopped, StopToken
from autofa.tuning.estimate import Estimator
from autofa.tuning.events import (
    BucketDone,
    BucketResult,
    BucketStarted,
    CandidateDone,
    Estimate,
    Event,
    Notice,
    OnEvent,
    Summary,
    TuneStarted,
    ignore,
)
from autofa.tuning.fleet import Answer, Fleet, join, patiently, recorder
from autofa.tuning.hardware import open_lab
from autofa.tuning.hints import Hints
from autofa.tuning.lab import Lab
from autofa.tuning.plan import BucketPlan, make_plan
from autofa.tuning.request import TuneRequest
from autofa.tuning.saving import LOCK_S, PATIENCE_S, Saver
from autofa.tuning.studies import Studies

_CLAIM_POLL_S = 0.5


class Session:
    """The state of one tune.

    Attributes:
        measured: how many rows it made.
    """

    def __init__(
        self,
        request: TuneRequest,
        lab: Lab,
        repository: Repository,
        emit: OnEvent,
        control: Control,
        studies: Studies | None = None,
    ) -> None:
        self.measured = 0
        self._studies = studies
        self._parts: dict[Problem, BucketResult] = {}
        self._cut: set[Problem] = set()
        self.request = request
        self.lab = lab
        self.repository = repository
        self.emit = emit
        self.control = control
        self.results: dict[Problem, BucketResult] = {}
        self.failures: Counter[str] = Counter()
        self.estimator = Estimator()
        self.hints = Hints(request.registry, request.mode)
        self.hints.learn(read_seed(lab.device))
        self.rows: dict[Bucket, list[Row]] = {}
        self.saver = Saver(repository, emit)
        self._make_search = None if studies is None else recorder(self, studies)
        self.read()
        for rows in self.rows.values():
            self.hints.learn(self._valid(rows))
        self.disturbed = 0
        self.unbuildable = False
        self.told = False

    def tell_problem(self) -> None:
        """Says once why nothing can be compiled, whenever that shows."""
        if self.lab.builder.problem and not self.told:
            self.told = True
            self.emit(Notice(self.lab.builder.problem))

    def tell_disturbance(self) -> None:
        """Says at the end which part of the results is rough."""
        if self.disturbed:
            self.emit(
                Notice(
                    f"other work disturbed the timing of {self.disturbed} of {len(self.results)} "
                    "buckets; `autofa report` marks what is rough: run it again with --force when "
                    "the machine is quiet"
                )
            )

    def read(self, bucket: Bucket | None = None) -> None:
        """Reads this device's rows, all or those of one bucket."""
        found = self.repository.rows(device=self.lab.device, bucket=bucket)
        if bucket is None:
            self.rows.clear()
        else:
            self.rows[bucket] = []
        self._remember(found)
        self._remember([r for r in self.saver.unsaved if bucket in (None, r.bucket)])

    def _remember(self, rows: Sequence[Row]) -> None:
        self.lab.clock.saw(rows)
        for row in rows:
            self.rows.setdefault(row.bucket, []).append(row)

    def _valid(self, rows: Sequence[Row]) -> list[Row]:
        registry, fingerprint = self.request.registry, self.lab.fingerprint
        return [r for r in rows if is_valid(validity(r, registry, fingerprint, self.lab.today))]

    def plan(self, problem: Problem) -> BucketPlan:
        rows = self.rows.get(bucket_of(problem), [])
        return make_plan(problem, rows, self.request, self.lab, self.hints, self._make_search)

    def plan_now(self, problem: Problem) -> BucketPlan:
        """With what others have stored by now."""
        self.patiently(lambda: self.read(bucket_of(problem)))
        return self.plan(problem)

    def patiently(self, work: Callable[[], Answer]) -> Answer:
        """As `fleet.patiently`, in this tune."""
        return patiently(work, self.control, self.emit)

    def settle(self, plan: BucketPlan) -> None:
        """Takes the result of a problem that needs no work."""
        rows = self._valid(self.rows.get(bucket_of(plan.problem), []))
        result = answer(plan, rows, self.request, reused=len(plan.known))
        self.results[plan.problem] = self._with_parts(result)
        self.unbuildable |= bool(plan.unbuildable)

    def run(self, claims: Claims) -> None:
        plans = [self.plan(problem) for problem in self.request.problems]
        for plan in plans:
            if plan.done:
                self.settle(plan)
        todo = self._fitting([plan for plan in plans if not plan.done])
        # What has no answer at all comes first, then what is only to be renewed or widened.
        todo.sort(key=lambda plan: plan.answered)
        if self.control.token.cancelled:
            raise Stopped
        total = len(todo)
        self.emit(
            TuneStarted(
                self.lab.device,
                self.repository.where,
                len(plans),
                sum(plan.done for plan in plans),
            )
        )
        self._estimate(todo, total)
        if self._studies is not None and self._studies.shared:
            Fleet(self, claims).run(todo)
            return
        waited = False
        while todo:
            claimed = next((p for p in todo if claims.take(p.problem)), None)
            if claimed is None:
                if not waited:
                    self.emit(Notice("another tune is measuring what is left here; waiting for it"))
                waited = True
                self.control.check()
                time.sleep(_CLAIM_POLL_S)
                continue
            todo.remove(claimed)
            try:
                self.bucket(claimed, todo, total)
            finally:
                claims.release(claimed.problem)
            self._estimate(todo, total)

    def _fitting(self, plans: Sequence[BucketPlan]) -> list[BucketPlan]:
        """The plans whose problems fit into memory; of the others it says why not.

        Raises:
            UsageError: nothing that was asked for fits.
        """
        refused = {plan.problem: memory.refusal(plan.problem, self.lab.device) for plan in plans}
        reasons = [reason for reason in refused.values() if reason]
        if reasons and len(reasons) == len(self.request.problems):
            raise UsageError(reasons[0])
        for reason in reasons:
            self.emit(Notice(f"left out: {reason}"))
        for plan in plans:
            if refused[plan.problem]:
                self.results[plan.problem] = replace(
                    answer(plan, list(plan.known.values()), self.request), complete=False
                )
        return [plan for plan in plans if not refused[plan.problem]]

    def _estimate(
        self, todo: Sequence[BucketPlan], total: int, running_s: float | None = None
    ) -> None:
        remaining = (running_s or 0.0) + self.estimator.remaining([plan.load for plan in todo])
        remaining /= self.request.workers
        done = total - len(todo) - (running_s is not None)
        self.emit(Estimate(max(0.0, min(remaining, self.control.left)), done, total))

    def was_cut(self, problem: Problem) -> bool:
        """Whether its search ended for want of time or of a compiler."""
        return problem in self._cut

    def bucket(
        self,
        planned: BucketPlan,
        todo: Sequence[BucketPlan],
        total: int,
        *,
        search_only: bool = False,
    ) -> bool:
        """One problem, planned again: hints have grown, and another tune may have been here.

        Returns whether it is decided; after a search that others share, only if it failed.
        """
        problem = planned.problem
        with suppress(StoreLockedError, StoreUnreachableError):  # what was read before serves too
            self.read(bucket_of(problem))
        plan = self.plan(problem)
        if plan.done:
            self.settle(plan)
            return True
        self.emit(BucketStarted(problem, total - len(todo), total, bool(plan.retime)))
        workers = min(self.request.workers, len(todo) + 1)
        share = self.control.left * workers / (len(todo) + 1)
        same_bucket = self.rows.get(bucket_of(problem), [])
        others = self._valid([r for r in same_bucket if r.problem != problem])

        def emit(event: Event) -> None:
            self.emit(event)
            if isinstance(event, CandidateDone):
                took = time.monotonic() - began
                self._estimate(todo, total, max(0.0, self.estimator.seconds(plan.load) - took))

        began = time.monotonic()
        run = BucketRun(plan, others, self.request, self.lab, self.control, self.save, emit, share)
        stopped = True
        no_room = 0
        decided = not search_only
        try:
            run.search() if search_only else run.run()
            stopped = False
        except LaunchError as error:
            decided = True
            no_room = isinstance(error, NoRoomError)
            status = "out_of_memory: " if no_room else ""
            p = problem
            self.emit(Notice(f"{p.shape} {p.dtype} {p.mask}: {status}{error}"))
        finally:
            result = run.result(stopped=stopped)
            result = self._with_parts(replace(result, failed=result.failed + no_room))
            self.failures.update(["out_of_memory"] * no_room)
            self.results[problem] = result
            self.unbuildable |= bool(plan.unbuildable)
            self.tell_problem()
            self.disturbed += run.disturbed
            new = list(run.new_rows)
            self.failures.update(row.status for row in new if row.status != "ok")
            if not stopped:
                self.hints.learn(new)
            if run.cut:
                self._cut.add(problem)
            if decided:
                self.estimator.finished(plan.load, result.seconds)
                self.emit(BucketDone(result))
            else:
                self._parts[problem] = result
        return decided

    def _with_parts(self, result: BucketResult) -> BucketResult:
        """With what this tune did for the problem before."""
        part = self._parts.get(result.problem)
        if part is None:
            return result
        return replace(
            result,
            measured=result.measured + part.measured,
            reused=max(0, result.reused - part.measured - part.failed),
            failed=result.failed + part.failed,
            seconds=result.seconds + part.seconds,
        )

    def save(self, rows: Sequence[Row]) -> None:
        """Takes rows that were made now."""
        self.measured += len(rows)
        self._remember(rows)
        self.saver.save(rows)

    def summary(self, interrupted: int | None) -> Summary:
        ordered = [self.results[p] for p in self.request.problems if p in self.results]
        lacking = self.unbuildable or any(not result.complete for result in ordered)
        return Summary(
            device=self.lab.device,
            db=self.repository.where,
            buckets=tuple(ordered),
            requested=len(self.request.problems),
            measured=sum(result.measured for result in ordered),
            reused=sum(result.reused for result in ordered),
            failed=sum(result.failed for result in ordered),
            failures=tuple(self.failures.most_common()),
            seconds=self.control.elapsed,
            interrupted=interrupted,
            budget_spent=self.control.spent,
            toolchain=self.lab.builder.problem if lacking else "",
            phases=tuple(self.control.phases.items()),
            compiling=self.lab.builder.seconds,
        )


def tune(
    request: TuneRequest,
    on_event: OnEvent = ignore,
    *,
    token: StopToken | None = None,
    laboratory: Callable[[TuneRequest], AbstractContextManager[Lab]] = open_lab,
) -> Summary:
    """Measures what the request asks for and the database does not hold yet.

    Rows are saved phase by phase, so whatever ends a tune loses at most the phase it is in, and the
    same request goes on where it stopped. Ends early, keeping everything, when the budget is spent,
    `token` is cancelled, or the main thread gets `KeyboardInterrupt` (`signals_interrupt` makes one
    of SIGINT and SIGTERM); the summary tells. `on_event` is called from this thread.

    Raises:
        DeviceError: the device is not there.
        UsageError: nothing that is asked for fits into memory; before any work.
        StoreError: the database cannot be opened or written; before any work.
        StoreLockedError, StoreUnreachableError: the same, or results were kept for it until the end
            and it never came free, or back.
    """
    control = Control(request.budget_s, token or StopToken())
    interrupted: int | None = None
    with (
        Repository.open(request.db, write=True, recover=True, timeout=LOCK_S) as repository,
        laboratory(request) as lab,
        ExitStack() as stack,
    ):
        if repository.moved_aside is not None:
            on_event(Notice(f"{repository.where} was damaged: moved to {repository.moved_aside}"))
        claims, studies = join(request, lab, stack)
        session = Session(request, lab, repository, on_event, control, studies)
        session.tell_problem()
        try:
            session.run(claims)
        except Stopped:
            pass
        except Interrupted as stop:
            interrupted = stop.number
        except KeyboardInterrupt:
            interrupted = signal.SIGINT
        # Whoever wants it to end gets one attempt.
        hurried = interrupted is not None or control.token.cancelled
        session.saver.finish(0.0 if hurried else PATIENCE_S)
        session.tell_disturbance()
        return session.summary(interrupted)
