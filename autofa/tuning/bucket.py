"""Measures one problem: search in batches, precise rounds among the best, and a last check."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

from autofa.bench.client import Entrant
from autofa.bench.protocol import Plan
from autofa.kernels.family import Variant
from autofa.kernels.registry import Candidate
from autofa.kernels.vendor import BASELINE
from autofa.problem import bucket_of
from autofa.store.ranking import Ranked
from autofa.store.rows import Row
from autofa.tuning.control import Control
from autofa.tuning.events import BucketResult, CandidateDone, OnEvent
from autofa.tuning.lab import Lab
from autofa.tuning.plan import FINALISTS, BucketPlan, ranking, to_retime
from autofa.tuning.records import as_held, cost, fingerprint_of
from autofa.tuning.request import TuneRequest
from autofa.tuning.search import FAR_BEHIND
from autofa.tuning.steps import Steps

# Candidates screened together: enough to interleave, few enough that each batch informs the next.
_BATCH = 8
_SCREEN_ROUNDS = 9
# What the screening has so close to the best goes through the precise rounds too, up to so many own
# kernels: between the batches of an H200, cooler in the first ones, the ratio of a kernel to plain
# SDPA moves by 5%.
_CLOSE = math.log(1.08)
_MOST_CLOSE = 2 * FINALISTS
# Precise rounds are repeated while a candidate outside of them might be as good as their best.
_MAX_FINALS = 3
# After an upgrade: first few, which only have to show whether something changed; where they say so,
# as many as the precise rounds have at least.
_RETIME_ROUNDS = 5
_DECIDING_ROUNDS = 15
# The search starts anew where the winner of before takes so many times the new best's time. What is
# re-timed of a first tune's differs from it by up to 5% on a quiet machine, with nothing changed.
_LOST = 1.1


class BucketRun:
    """One problem's work, in three phases; each saves its rows before the next begins.

    `run` raises `Stopped` or `KeyboardInterrupt` in the middle of it; `result` is right at any
    time. Not thread-safe.

    Args:
        save: takes new rows for the database.
        share_s: seconds after which the search gives way to the precise rounds.
        ahead: variants of the next problem, to be compiled when this one's are.
    """

    def __init__(
        self,
        plan: BucketPlan,
        others: Sequence[Row],
        request: TuneRequest,
        lab: Lab,
        control: Control,
        save: Callable[[Sequence[Row]], None],
        emit: OnEvent,
        share_s: float,
        ahead: Sequence[Variant] = (),
    ) -> None:
        self._plan = plan
        self._problem = plan.problem
        self._others = others
        self._request = request
        self._lab = lab
        self._control = control
        self._save = save
        self._emit = emit
        self._share_s = share_s
        self._ahead = ahead
        self._began = time.monotonic()
        self._search = plan.search
        self._rows = dict(plan.known)
        self._new: dict[str, Row] = {}
        self._steps = Steps(plan.problem, lab, control, self._keep, emit)
        self._precise: set[str] = set()
        self._cut = False
        self._held = ""

    def run(self) -> None:
        """Does what the plan says.

        Raises:
            Stopped: the budget ended, or the tune was cancelled.
            LaunchError: the worker does not start, or plain SDPA cannot be measured.
        """
        try:
            if self._plan.retime:
                self._revalidate()
            self._find()
        finally:
            self._search.close()
        if self._plan.final or self._plan.undecided or self._new.keys() - self._precise:
            self._precise_rounds(self._contenders())
        self._confirm_winner()

    def search(self) -> None:
        """Takes part in a search that other processes share; the precise rounds are for one of
        them, when all is measured. Raises as `run` does."""
        try:
            self._find()
        finally:
            self._search.close()

    # After an upgrade ------------------------------------------------------------------------

    def _revalidate(self) -> None:
        """Re-times what decided then, in a few rounds. The winner stays while it is tied with the
        best; another takes its place only by more rounds. Where the winner fails or falls far
        behind, what was measured then is no guide, and the search starts anew."""
        before = self._answer()
        self._held = before
        todo = self._plan.retime
        for _ in range(_MAX_FINALS):
            self._control.check()
            self._retime(todo, _RETIME_ROUNDS)
            stale = self._plan.stale - self._new.keys()
            plan = self._plan
            todo = to_retime(self._rows, stale, plan.vendors, plan.variants, self._request)
            if not todo:
                break
        if self._answer() == before:
            return
        registry = self._request.registry
        timed = [slug for slug, row in self._new.items() if row.status == "ok"]
        self._retime([registry.candidate(slug) for slug in timed], _DECIDING_ROUNDS)
        speedups = {r.slug: r.speedup or 0.0 for r in self._ranking() if r.slug in timed}
        if speedups.get(before, 0.0) * _LOST < max(speedups.values(), default=0.0):
            self._held = ""
            self._search = self._plan.search_anew(list(self._new.values()))

    def _retime(self, candidates: Sequence[Candidate], rounds: int) -> None:
        # On the problem itself; the odd inputs they got right when they were first measured.
        entrants = self._steps.admitted(candidates, thorough=False)
        if entrants:
            self._steps.time(entrants, self._brief(len(entrants), rounds), final=True)
        self._precise.update(candidate.slug for candidate in candidates)

    def _answer(self) -> str:
        """What dispatch would call by the rows of this problem."""
        order = self._ranking()
        return order[0].slug if order and order[0].beats_sdpa else BASELINE

    def _brief(self, count: int, rounds: int = _SCREEN_ROUNDS) -> Plan:
        """Rounds in which so many candidates take part to the end."""
        return Plan(
            mode=self._request.mode,
            screen_rounds=rounds,
            min_rounds=rounds,
            max_rounds=rounds,
            finalists=count,
        )

    # The search ------------------------------------------------------------------------------

    def _find(self) -> None:
        search = self._search
        batch = self._begin(search.ask(_BATCH))
        while batch:
            self._control.check()
            if self._late:
                self._cut = True
                return
            self._order(batch)
            # With compilers beside the measurement the next batch is chosen one batch ahead.
            coming = search.ask(_BATCH) if self._lab.overlap else []
            self._order(coming)
            if self._lab.overlap and not coming:
                self._order(self._ahead)
            self._screen(batch)
            if self._steps.unresolved(batch):
                self._cut = True  # the compiler failed as such; the next plan does without it
                return
            batch = coming or search.ask(_BATCH)

    def _begin(self, batch: list[Variant]) -> list[Variant]:
        """Measures the vendors that are new, and what is built of the first batch, before a
        compiler is waited for: that may take long, or hang. Returns the rest of the batch."""
        built = [v for v in batch if self._lab.builder.cached(v) is not None]
        if len(built) == len(batch):
            return batch
        if self._lab.overlap:
            self._order(batch)
        if self._search.alone:
            vendors = [vendor for vendor in self._plan.vendors if vendor.slug not in self._rows]
            self._screen(built, vendors)
        elif built:
            self._screen(built)
        return [variant for variant in batch if variant not in built]

    def _order(self, variants: Sequence[Variant]) -> None:
        """Has these compiled. Rows carry the fingerprints of now: where a source is edited before
        its compiler reads it, the row is not valid afterwards, which is the safe side."""
        for variant in variants:
            fingerprint_of(variant, self._lab)
        self._lab.builder.prefetch(variants)

    @property
    def _late(self) -> bool:
        return time.monotonic() - self._began > self._share_s

    def _screen(self, batch: Sequence[Variant], vendors: Sequence[Candidate] = ()) -> None:
        entrants = self._steps.admitted([*vendors, *batch], lambda: self._late)
        if entrants:
            self._steps.time(entrants, self._brief(len(entrants)), final=False)
        for variant in batch:
            row = self._new.get(variant.slug)
            if row is None:
                self._search.skip(variant)
            else:
                self._search.tell(variant, cost(row))

    # Precise rounds --------------------------------------------------------------------------

    def _contenders(self) -> list[Candidate]:
        """The vendors, the best few and those close to them, and each family's default, as far as
        they may be used; not the default of a family that is far behind."""
        found: dict[str, Candidate] = {v.slug: v for v in self._plan.vendors}
        variants = {v.slug: v for v in self._plan.variants}
        measured = {s: cost(row) for s, row in self._rows.items() if s in variants}
        costs = {slug: value for slug, value in measured.items() if value is not None}
        least = min(costs.values(), default=math.inf)
        order = [r.slug for r in self._ranking() if r.slug in variants]
        close = [slug for slug in order if costs.get(slug, math.inf) <= least + _CLOSE]
        for slug in [*order[:FINALISTS], *close[:_MOST_CLOSE]]:
            found[slug] = variants[slug]
        for family in dict.fromkeys(v.family.name for v in self._plan.variants):
            default = next(v for v in self._plan.variants if v.family.name == family)
            if costs.get(default.slug, math.inf) <= least + FAR_BEHIND:
                found.setdefault(default.slug, default)
        return [c for slug, c in found.items() if self._usable(slug)]

    def _usable(self, slug: str) -> bool:
        row = self._rows.get(slug)
        return row is None or row.status == "ok"

    def _precise_rounds(self, candidates: Sequence[Candidate]) -> None:
        for _ in range(_MAX_FINALS):
            self._control.check()
            entrants = self._steps.admitted(candidates)
            plan = Plan(mode=self._request.mode, finalists=FINALISTS)
            self._steps.time(entrants, plan, final=True)
            self._precise.update(self._lasted(entrants))
            # A screened candidate must never win by the luck of its few samples.
            order = self._ranking()
            doubtful = [r.slug for r in order if r.tied and r.slug not in self._precise]
            if not doubtful:
                return
            known = [r.slug for r in order if r.slug in self._precise]
            again = {order[0].slug, *known[:1], *doubtful[: 2 * FINALISTS]}
            registry = self._request.registry
            candidates = [registry.candidate(slug) for slug in sorted(again)]

    def _lasted(self, entrants: Sequence[Entrant]) -> set[str]:
        """Who took part in all rounds of the last timing, as plain SDPA did."""
        rounds = self._new[BASELINE].samples if BASELINE in self._new else 0
        slugs = [entrant.candidate.slug for entrant in entrants]
        return {s for s in slugs if s not in self._new or self._new[s].samples >= rounds}

    def _confirm_winner(self) -> None:
        """Checks the winner once more after it won; if it fails now, the next one has won."""
        while self._new:
            order = self._ranking()
            slug = order[0].slug if order and order[0].beats_sdpa else BASELINE
            winner = self._request.registry.find(slug)
            if winner is None or slug == BASELINE or slug not in self._new:
                return
            # What held had the thorough check when it was first measured, with these very bytes.
            outcome = self._steps.check(winner, thorough=slug != self._held)
            if outcome is None or outcome.ok:
                return
            self._steps.fail(winner, outcome)

    # Rows ------------------------------------------------------------------------------------

    def _keep(self, rows: Sequence[Row], final: bool) -> None:
        rows = [as_held(row) if row.slug == self._held else row for row in rows]
        self._save(rows)
        for row in rows:
            self._rows[row.slug] = self._new[row.slug] = row
            speedup = row.speedup(self._request.mode)
            self._emit(
                CandidateDone(
                    self._problem, row.slug, row.status, row.time_ms, speedup, final, row.message
                )
            )

    def _ranking(self) -> list[Ranked]:
        return ranking(self._rows.values(), self._request)

    # The result ------------------------------------------------------------------------------

    def result(self, *, stopped: bool) -> BucketResult:
        """What came of it. `stopped`: `run` did not come to its end."""
        failed = sum(row.status != "ok" for row in self._new.values())
        return answer(
            self._plan,
            [*self._others, *self._rows.values()],
            self._request,
            measured=len(self._new) - failed,
            reused=sum(slug not in self._new for slug in self._plan.known),
            failed=failed,
            seconds=time.monotonic() - self._began,
            complete=not (stopped or self._cut),
        )

    @property
    def cut(self) -> bool:
        """Whether its search ended before its end, for want of time or of a compiler."""
        return self._cut

    @property
    def disturbed(self) -> bool:
        """Whether other work disturbed its last precise rounds."""
        return self._steps.disturbed

    @property
    def new_rows(self) -> Iterable[Row]:
        """The newest row of each candidate that was measured or failed now."""
        return self._new.values()


def answer(
    plan: BucketPlan,
    rows: Sequence[Row],
    request: TuneRequest,
    *,
    measured: int = 0,
    reused: int = 0,
    failed: int = 0,
    seconds: float = 0.0,
    complete: bool = True,
) -> BucketResult:
    """The winner of the problem's bucket as the dispatcher will see it, over all its `rows`."""
    bucket = bucket_of(plan.problem)
    order = ranking((row for row in rows if row.bucket == bucket), request)
    winner = None
    if order:
        winner = order[0].slug if order[0].beats_sdpa else BASELINE
    return BucketResult(
        problem=plan.problem,
        winner=winner,
        speedup=1.0 if winner == BASELINE else order[0].speedup if order else None,
        measured=measured,
        reused=reused,
        failed=failed,
        seconds=seconds,
        complete=complete and not plan.unbuildable,
    )
