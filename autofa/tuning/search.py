"""Which variants to measure next, by Optuna.

A study is derived from measurements and lives in memory: one family's declared space, each
parameter as the index into its ordered values (measured per trial: memory 5.6 ms, Optuna on SQLite
73 ms). A space no larger than the trials is walked instead, without loading Optuna. What is tried
next is for a `strategies.Strategy` to say. `recording` has the searches whose studies live
elsewhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from autofa.kernels.family import KernelFamily, Variant
from autofa.tuning.strategies import (
    DEFAULT,
    Known,
    Point,
    Strategy,
    nearest_to_best,
    steps_between,
)

if TYPE_CHECKING:
    import optuna

# A family further than this from the best one gets no more than its first share of the trials.
_HOPELESS = math.log(1.5)
# So far, and it gets no more than its default.
FAR_BEHIND = math.log(2.0)
# A family's search has settled once so many points around its best one are known, the nearest.
_AROUND = 8
# Samplers repeat points of a discrete space; after so many in one ask, a random one is taken.
_MAX_REPEATS = 16


def quiet_optuna() -> None:
    """Optuna without its own handler on stderr: what it says goes through Python's root logger."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    optuna.logging.disable_default_handler()
    optuna.logging.enable_propagation()


@dataclass(frozen=True)
class Scored:
    """A variant and its cost: log of its time over plain SDPA's in the same rounds."""

    variant: Variant
    cost: float


class FamilySearch:
    """The search within one family for one problem. Not thread-safe.

    `ask` gives each legal variant at most once; `tell` and `learn` take costs, None for a variant
    that failed. The order is a function of the arguments and of what was told, so of the seed.

    Args:
        legal: the legal variants, the default first.
        hints: variants to try early, the likeliest first; those not legal here are ignored.
        trials: how many variants the whole search may ask for; decides between walk and strategy.
    """

    def __init__(
        self,
        family: KernelFamily,
        legal: Sequence[Variant],
        hints: Iterable[Variant] = (),
        *,
        trials: int,
        seed: int = 0,
        strategy: Strategy = DEFAULT,
    ) -> None:
        self.family = family
        self._legal = {variant.slug: variant for variant in legal}
        self._by_values = {variant.values: variant.slug for variant in legal}
        first = [*legal[:1], *hints]
        self._first = [s for s in dict.fromkeys(v.slug for v in first) if s in self._legal]
        self._costs: dict[str, float | None] = {}
        self._asked: set[str] = set()
        self._running: dict[str, optuna.Trial] = {}
        self._walks = len(self._legal) <= trials
        self._strategy = strategy
        self._seed = seed
        self._random = random.Random(seed)

    @cached_property
    def _labels(self) -> tuple[str, ...]:
        """What the study calls the parameters."""
        return tuple(param.name for param in self.family.params)

    @cached_property
    def _space(self) -> dict[str, optuna.distributions.BaseDistribution]:
        import optuna

        return {
            label: optuna.distributions.IntDistribution(0, len(param.values) - 1)
            for label, param in zip(self._labels, self.family.params, strict=True)
        }

    @cached_property
    def _study(self) -> optuna.Study:
        """Made at the first ask."""
        quiet_optuna()
        return self._open_study()

    def _open_study(self) -> optuna.Study:
        """Filled with what was learnt before."""
        import optuna

        study = optuna.create_study(sampler=self._strategy.sampler(self._seed))
        for slug, cost in self._costs.items():
            self._add(study, slug, cost)
        return study

    @cached_property
    def _points(self) -> dict[str, Point]:
        params = self.family.params
        return {
            slug: tuple(p.values.index(v) for p, v in zip(params, variant.values, strict=True))
            for slug, variant in self._legal.items()
        }

    def _named(self, point: Point) -> dict[str, int]:
        return dict(zip(self._labels, point, strict=True))

    def _add(self, study: optuna.Study, slug: str, cost: float | None) -> None:
        import optuna

        # add_trial takes values outside the distributions in silence; only legal slugs come here.
        study.add_trial(
            optuna.trial.create_trial(
                value=0.0 if cost is None else cost,
                params=self._named(self._points[slug]),
                distributions=dict(self._space),
                constraints={} if cost is not None else {"failed": 1.0},
                user_attrs=self._told_of(slug),
            )
        )

    def _told_of(self, slug: str) -> dict[str, str]:
        """What a study says of a point to people."""
        return {}

    @property
    def remaining(self) -> int:
        """Legal variants not yet asked for."""
        return len(self._legal) - len(self._asked)

    @property
    def attempts(self) -> int:
        """Variants asked for or learnt."""
        return len(self._asked)

    @property
    def best(self) -> Scored | None:
        costs = [(c, s) for s, c in self._costs.items() if c is not None]
        if not costs:
            return None
        cost, slug = min(costs)
        return Scored(self._legal[slug], cost)

    @property
    def waiting(self) -> bool:
        """Whether somebody who was given a point died with it, so that another is to measure it."""
        return False

    @property
    def settled(self) -> bool:
        """Whether the points nearest to the best one are known, so that it is the best around. Says
        the same of the same measurements, in whatever order they came."""
        best = self.best
        if best is None:
            return False
        place = self._points[best.variant.slug]
        order = sorted(self._points.items(), key=lambda i: (steps_between(i[1], place), i[1]))
        return all(slug in self._costs for slug, _ in order[: _AROUND + 1])

    def learn(self, variant: Variant, cost: float | None) -> None:
        """Takes a stored measurement, before the first `ask`. Points outside today's legal space
        teach nothing."""
        if variant.slug in self._legal and variant.slug not in self._asked:
            self._asked.add(variant.slug)
            self._costs[variant.slug] = cost

    def ask(self) -> Variant | None:
        """The next variant to measure; None where every legal one was asked for."""
        if not self.remaining:
            return None
        slug = self._walk() if self._walks else self._sample()
        self._asked.add(slug)
        return self._legal[slug]

    def sure(self) -> list[Variant]:
        """What `ask` will give whatever is told until then: worth compiling now."""
        return [self._legal[s] for s in self._first if s not in self._asked]

    def _walk(self) -> str:
        return self._slug_at(self._chosen())

    def _slug_at(self, point: Point | None) -> str:
        return next(slug for slug, place in self._points.items() if place == point)

    def _chosen(self) -> Point | None:
        """The default and the hints first, then what the strategy says, or the nearest."""
        for slug in self._first:
            if slug not in self._asked:
                return self._points[slug]
        known = Known(
            {self._points[slug]: cost for slug, cost in self._costs.items()},
            [self._points[slug] for slug in self._legal if slug in self._asked - set(self._costs)],
            [self._points[slug] for slug in self._legal if slug not in self._asked],
        )
        if self._walks:
            return nearest_to_best(known, self._random) or known.open[0]
        return self._strategy.choose(known, self._random)

    def _sample(self) -> str:
        for _ in range(_MAX_REPEATS):
            chosen = self._chosen()
            if chosen is not None:
                self._propose(chosen)
            trial = self._study.ask(dict(self._space))
            slug = self._slug_of(trial.params)
            if slug is None:
                trial.set_constraint("illegal", 1.0)
                self._study.tell(trial, 0.0)
            elif slug not in self._asked:
                self._running[slug] = trial
                return slug
            elif slug in self._costs:
                self._finish(trial, self._costs[slug])
            else:  # asked for and not measured yet: there is no answer to give
                import optuna

                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return self._by_chance(
            self._random.choice([s for s in self._legal if s not in self._asked])
        )

    def _propose(self, point: Point) -> None:
        """Makes it the next that the study is asked for."""
        self._study.enqueue_trial(self._named(point))

    def _by_chance(self, slug: str) -> str:
        """Takes what the sampler did not come to, beside it."""
        return slug

    def _slug_of(self, params: Mapping[str, int]) -> str | None:
        """Of a trial's parameters; None for a point that is not legal."""
        pairs = zip(self._labels, self.family.params, strict=True)
        return self._by_values.get(tuple(p.values[params[label]] for label, p in pairs))

    def tell(self, variant: Variant, cost: float | None) -> None:
        """Takes the result of a variant that `ask` gave. None: it failed, and never wins."""
        self._costs[variant.slug] = cost
        if self._walks:
            return
        trial = self._running.pop(variant.slug, None)
        if trial is None:  # taken at random, beside the sampler
            self._add(self._study, variant.slug, cost)
        else:
            self._finish(trial, cost)

    def skip(self, variant: Variant) -> None:
        """Takes back a variant that `ask` gave and that was not measured after all."""
        self.tell(variant, None)

    def _finish(self, trial: optuna.Trial, cost: float | None) -> None:
        # TPE learns nothing from FAIL trials; a violated constraint steers it away.
        if cost is None:
            trial.set_constraint("failed", 1.0)
        self._study.tell(trial, 0.0 if cost is None else cost)


class BucketSearch:
    """The families' searches for one problem, which share a number of trials. Not thread-safe.

    Every family first gets its default, then an equal share of half the trials, unless it is more
    than twice as slow as the best; what is left goes to the families that came within 1.5x of the
    best, until each has settled.

    Args:
        behind: families that were that slow in a bucket like this one.

    Attributes:
        alone: whether this process is the only one that measures the problem.
    """

    alone = True

    def __init__(
        self, searches: Sequence[FamilySearch], trials: int, behind: Collection[str] = ()
    ) -> None:
        self._searches = tuple(searches)
        self._trials = trials
        self._behind = frozenset(behind)
        self._of = {search.family.name: search for search in searches}

    @property
    def over(self) -> bool:
        """Whether `ask` has nothing more to give."""
        attempts = sum(search.attempts for search in self._searches)
        return attempts >= self._trials or self._next() is None

    @property
    def left(self) -> int:
        """At most so many variants will still be asked for."""
        if self.over:
            return 0
        attempts = sum(search.attempts for search in self._searches)
        return min(self._trials - attempts, sum(search.remaining for search in self._searches))

    def ask(self, count: int) -> list[Variant]:
        """Up to `count` new variants; empty when the search is over."""
        found: list[Variant] = []
        while len(found) < count and not self.over:
            search = self._next()
            variant = search.ask() if search is not None else None
            if variant is not None:
                found.append(variant)
        return found

    def _next(self) -> FamilySearch | None:
        for search in self._searches:
            if search.waiting:
                return search
        share = max(1, self._trials // max(1, 2 * len(self._searches)))
        open_ = [search for search in self._searches if search.remaining]
        bests = [s.best.cost for s in self._searches if s.best is not None]
        top = min(bests, default=math.inf)
        early = [s for s in open_ if s.attempts < (1 if self._far_behind(s, top) else share)]
        if early:
            return min(early, key=lambda search: search.attempts)
        limit = top + _HOPELESS
        alive = [s for s in open_ if s.best is not None and s.best.cost <= limit and not s.settled]
        if not bests:  # nothing is known here yet: whatever was not far behind elsewhere
            alive = [s for s in open_ if s.family.name not in self._behind] or open_
        return min(alive, key=lambda search: search.attempts, default=None)

    def _far_behind(self, search: FamilySearch, top: float) -> bool:
        """By what was measured here; before that, by what is known of buckets like this one."""
        if search.best is None:
            return search.family.name in self._behind
        return search.best.cost > top + FAR_BEHIND

    def sure(self) -> list[Variant]:
        """As `FamilySearch.sure`, of all families."""
        return [variant for search in self._searches for variant in search.sure()]

    def learn(self, variant: Variant, cost: float | None) -> None:
        """A stored measurement, as `FamilySearch.learn`."""
        search = self._of.get(variant.family.name)
        if search is not None:
            search.learn(variant, cost)

    def tell(self, variant: Variant, cost: float | None) -> None:
        """The result of a variant that `ask` gave, as `FamilySearch.tell`."""
        self._of[variant.family.name].tell(variant, cost)

    def skip(self, variant: Variant) -> None:
        """As `FamilySearch.skip`."""
        self._of[variant.family.name].skip(variant)

    def look(self) -> bool:
        """Brings it up to date. Whether nothing that was asked for is with other processes."""
        return True

    def close(self) -> None:
        """Ends the asking: what was given and not measured is for others."""
