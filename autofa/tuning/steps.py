"""The single steps of one problem: compile, check, time. bucket.py decides about them."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from autofa.bench.client import Entrant
from autofa.bench.protocol import Outcome, Plan, TimingRun
from autofa.kernels.family import Variant
from autofa.kernels.registry import Candidate
from autofa.kernels.vendor import VendorKernel
from autofa.problem import Problem
from autofa.store.rows import Row
from autofa.tuning.control import Control
from autofa.tuning.events import Building, OnEvent
from autofa.tuning.lab import Lab
from autofa.tuning.records import conditions_of, disturbance, record


class Steps:
    """What is built and checked for one problem so far. Not thread-safe.

    Attributes:
        disturbed: whether the last precise rounds were, twice.

    Args:
        keep: takes the rows of a step, and whether they are of precise rounds.
    """

    def __init__(
        self,
        problem: Problem,
        lab: Lab,
        control: Control,
        keep: Callable[[Sequence[Row], bool], None],
        emit: OnEvent,
    ) -> None:
        self._problem = problem
        self._lab = lab
        self._control = control
        self._keep = keep
        self._emit = emit
        self._checked: dict[str, float | None] = {}
        self._libraries: dict[str, Path | None] = {}
        self._failed: set[str] = set()
        self.disturbed = False

    def unresolved(self, variants: Sequence[Variant]) -> bool:
        """Whether any of these was neither built nor recorded as failed."""
        return any(v.slug not in self._libraries and v.slug not in self._failed for v in variants)

    def admitted(
        self,
        candidates: Sequence[Candidate],
        late: Callable[[], bool] = lambda: False,
        *,
        thorough: bool = True,
    ) -> list[Entrant]:
        """Those that compile and compute attention; what fails is recorded. Once it is `late` the
        rest is left out, so that the first can still be timed. `thorough` as of `check`; what plans
        each shape for long is tried on the problem alone until it wins."""
        self._build([c for c in candidates if isinstance(c, Variant)])
        entrants: list[Entrant] = []
        for candidate in candidates:
            slug = candidate.slug
            if entrants and late():
                break
            if isinstance(candidate, Variant) and slug not in self._libraries:
                continue
            if slug not in self._checked:
                self._control.check()
                plans = isinstance(candidate, VendorKernel) and candidate.plans
                outcome = self.check(candidate, thorough=thorough and not plans)
                if outcome is None:
                    continue
                if not outcome.ok:
                    self.fail(candidate, outcome)
                    continue
                self._checked[slug] = outcome.error
            entrants.append(Entrant(candidate, self._libraries.get(slug)))
        return entrants

    def _build(self, variants: Sequence[Variant]) -> None:
        builder = self._lab.builder
        waiting = builder.waiting(variants)
        if waiting:
            self._emit(Building(waiting))
        with self._control.phase("waiting for compilers"):
            builds = builder.take(variants, self._control.check)
        for build in builds:
            slug = build.variant.slug
            if build.status == "ok":
                self._libraries[slug] = build.library
            elif slug not in self._failed:
                failed = Outcome(slug, build.status, build.message, seconds=build.seconds)
                self.fail(build.variant, failed)

    def _lost(self, candidate: Candidate) -> bool:
        """Whether its library has gone or was damaged: then a failure is not the kernel's."""
        return isinstance(candidate, Variant) and self._lab.builder.cached(candidate) is None

    def check(self, candidate: Candidate, *, thorough: bool = True) -> Outcome | None:
        """What the check finds; None where there is no library to check, compiled again or not.
        Not `thorough`: on the problem alone, not on the odd inputs like it."""
        for _ in range(2):
            library = self._libraries.get(candidate.slug)
            if isinstance(candidate, Variant) and library is None:
                return None
            with self._control.phase("checking"):
                outcome = self._lab.measurer.check(
                    candidate,
                    library,
                    self._problem,
                    thorough=thorough,
                    poll=self._control.wait,
                )
            if outcome.ok or not isinstance(candidate, Variant) or not self._lost(candidate):
                return outcome
            del self._libraries[candidate.slug]
            self._build([candidate])
        return None

    def time(self, entrants: Sequence[Entrant], plan: Plan, *, final: bool) -> None:
        """Times them together and saves their rows under one run."""
        self._control.check()
        timed = self._measure(entrants, plan)
        if self._lost_in(entrants, timed):
            entrants = self.admitted([entrant.candidate for entrant in entrants])
            timed = self._measure(entrants, plan)
            lost = self._lost_in(entrants, timed)
            entrants = [e for e in entrants if e.candidate.slug not in lost]
        if final:
            timed = self._again_if_disturbed(timed, entrants, plan)
        run = uuid.uuid4().hex
        conditions = conditions_of(timed, final=final)
        outcomes = {outcome.slug: outcome for outcome in timed.outcomes}
        rows = []
        for candidate in (entrant.candidate for entrant in entrants):
            outcome = outcomes[candidate.slug]
            if outcome.ok and outcome.timing is None:
                continue  # the time was over before its first turn
            made = record(
                self._lab,
                self._problem,
                candidate,
                outcome,
                run=run,
                error=self._checked[candidate.slug],
                conditions=conditions,
            )
            rows.append(made)
        self._keep(rows, final)

    def _measure(self, entrants: Sequence[Entrant], plan: Plan) -> TimingRun:
        left = self._control.left
        if left < math.inf:
            budget = max(1.0, left)
            # Half of it for warming up, so that those that are warm then still get their rounds.
            plan = replace(plan, budget_s=min(plan.budget_s, budget), warm_up_s=budget / 2)
        with self._control.phase("timing"):
            return self._lab.measurer.time(entrants, self._problem, plan, poll=self._control.wait)

    def _again_if_disturbed(
        self, timed: TimingRun, entrants: Sequence[Entrant], plan: Plan
    ) -> TimingRun:
        """The timing, or a second one that was disturbed less."""
        before = disturbance(timed, plan.mode)
        if before > 1.0 and self._control.left > plan.budget_s:
            again = self._measure(entrants, plan)
            sound = all(outcome.ok for outcome in again.outcomes)
            if sound and disturbance(again, plan.mode) < before:
                timed = again
        self.disturbed = disturbance(timed, plan.mode) > 1.0
        return timed

    def _lost_in(self, entrants: Sequence[Entrant], timed: TimingRun) -> set[str]:
        """Slugs of those that failed for want of their library."""
        failed = {outcome.slug for outcome in timed.outcomes if not outcome.ok}
        return {
            entrant.candidate.slug
            for entrant in entrants
            if entrant.candidate.slug in failed and self._lost(entrant.candidate)
        }

    def fail(self, candidate: Candidate, outcome: Outcome) -> None:
        """Records a failure."""
        self._checked.pop(candidate.slug, None)
        self._failed.add(candidate.slug)
        run = uuid.uuid4().hex
        self._keep([record(self._lab, self._problem, candidate, outcome, run=run)], False)
