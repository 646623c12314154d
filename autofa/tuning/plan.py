"""What is left to do for one problem, given what the database holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from autofa.kernels.family import Variant
from autofa.kernels.registry import Candidate
from autofa.kernels.vendor import BASELINE, VendorKernel
from autofa.problem import Problem
from autofa.store.ranking import CURRENT, Ranked, is_valid, rank, validity
from autofa.store.rows import Row
from autofa.tuning.estimate import Load
from autofa.tuning.hints import Hints
from autofa.tuning.lab import Lab
from autofa.tuning.records import cost, is_screened, newest_by_slug
from autofa.tuning.request import TuneRequest
from autofa.tuning.search import BucketSearch, FamilySearch

# Makes the search for a problem whose measurements several processes share, or somebody watches:
# from each family's legal variants, the variants to try early, and families known to be far behind.
MakeSearch = Callable[
    [Problem, Mapping[str, Sequence[Variant]], Sequence[Variant], Collection[str]], BucketSearch
]

# How many of the best go through the precise rounds.
FINALISTS = 4
# How many of the best are re-timed after an upgrade, beside plain SDPA and the default: the winner
# and whoever is the likeliest to overtake it.
RETIMED = 2


@dataclass(frozen=True)
class BucketPlan:
    """The work of one problem.

    Attributes:
        vendors: the baseline first.
        variants: legal ones that are built or can be; each family's default first.
        unbuildable: legal ones left out for want of a compiler.
        known: slug -> newest row, where it stands today: measured, or failed with today's versions.
        stale: slugs of `known` whose versions changed.
        retime: of these, what an upgrade must be tried on before `known` is relied on.
        final: vendors that lack precise rounds.
        undecided: an earlier tune ended before the precise rounds of what is best now.
        search: already knows `known`.
        search_anew: a search that knows only the rows it is given.
    """

    problem: Problem
    vendors: tuple[VendorKernel, ...]
    variants: tuple[Variant, ...]
    unbuildable: int
    known: dict[str, Row]
    stale: frozenset[str]
    retime: tuple[Candidate, ...]
    final: tuple[Candidate, ...]
    undecided: bool
    search: BucketSearch
    search_anew: Callable[[Sequence[Row]], BucketSearch]

    @property
    def done(self) -> bool:
        return not (self.retime or self.final or self.undecided) and self.search.over

    @property
    def answered(self) -> bool:
        """Whether some measurement stands already."""
        return any(row.status == "ok" for row in self.known.values())

    @property
    def load(self) -> Load:
        new = self.search.left
        rest = len(self.retime) + max(len(self.final), FINALISTS * self.undecided)
        return Load(self.problem, 0 if self.done else new + rest, new)


def _search(
    problem: Problem,
    variants: Sequence[Variant],
    hints: Hints,
    request: TuneRequest,
    rows: Sequence[Row],
    make: MakeSearch | None = None,
) -> BucketSearch:
    legal: dict[str, list[Variant]] = {}
    for variant in variants:
        legal.setdefault(variant.family.name, []).append(variant)
    near, behind = hints.near(problem), hints.behind(problem)
    search = (make or partial(_in_memory, request))(problem, legal, near, behind)
    for row in rows:
        candidate = request.registry.find(row.slug)
        if isinstance(candidate, Variant):
            search.learn(candidate, cost(row))
    return search


def _in_memory(
    request: TuneRequest,
    problem: Problem,
    legal: Mapping[str, Sequence[Variant]],
    near: Sequence[Variant],
    behind: Collection[str],
) -> BucketSearch:
    searches = [
        FamilySearch(
            found[0].family,
            found,
            [v for v in near if v.family.name == name],
            trials=request.trials,
        )
        for name, found in legal.items()
    ]
    return BucketSearch(searches, request.trials, behind)


def admitted(candidate: Candidate, problem: Problem, request: TuneRequest) -> bool:
    """Whether dispatch would use it at the request's precision."""
    fast = candidate.accuracy(problem.dtype) == "fast"
    return not fast or request.settings.precision == "fast"


def make_plan(
    problem: Problem,
    rows: Sequence[Row],
    request: TuneRequest,
    lab: Lab,
    hints: Hints,
    make_search: MakeSearch | None = None,
) -> BucketPlan:
    """Plans one problem. `rows` are the device's; those of other shapes are passed over.

    A failure of other versions is forgotten: what failed then may work now. With `request.force`
    all rows are, or those from before `request.since`. Variants that dispatch would not use at the
    precision of `request.settings` are not searched; vendors are all measured, to be compared with.

    Args:
        make_search: used where the stored rows are relied on as they are; None searches in memory.
    """
    legal = [
        candidate
        for candidate in request.registry.legal(problem, lab.limits, request.families)
        if isinstance(candidate, VendorKernel) or admitted(candidate, problem, request)
    ]
    vendors = tuple(c for c in legal if isinstance(c, VendorKernel))
    possible = [c for c in legal if isinstance(c, Variant)]
    variants = possible
    if lab.builder.problem:
        variants = [v for v in possible if lab.builder.cached(v) is not None]

    names = {c.slug for c in legal}
    stored = standing(rows, problem, request, lab)
    known = {slug: row for slug, (row, _) in stored.items() if slug in names}
    stale = {slug for slug, (_, current) in stored.items() if slug in names and not current}
    retime = to_retime(known, stale, vendors, variants, request)
    search_anew = partial(_search, problem, variants, hints, request)
    relied_on = not (retime or request.force)
    return BucketPlan(
        problem,
        vendors,
        tuple(variants),
        len(possible) - len(variants),
        known,
        frozenset(stale),
        retime,
        tuple(v for v in vendors if v.slug not in known or is_screened(known[v.slug])),
        _undecided(known, request),
        search_anew(list(known.values()), make_search if relied_on else None),
        search_anew,
    )


def standing(
    rows: Iterable[Row], problem: Problem, request: TuneRequest, lab: Lab
) -> dict[str, tuple[Row, bool]]:
    """slug -> the newest row that stands today, and whether it is of today's versions."""
    found: dict[str, tuple[Row, bool]] = {}
    if request.force:
        since = request.since
        rows = [row for row in rows if since and row.provenance.created_at >= since]
    for slug, row in newest_by_slug(rows, problem).items():
        state = validity(row, request.registry, lab.fingerprint, lab.today)
        current = state == CURRENT
        if row.status != "pruned" and (current or (row.status == "ok" and is_valid(state))):
            found[slug] = row, current
    return found


def ranking(rows: Iterable[Row], request: TuneRequest) -> list[Ranked]:
    """What dispatch would choose from these rows, the best first."""
    used = []
    for row in rows:
        candidate = request.registry.find(row.slug)
        if candidate is None or admitted(candidate, row.problem, request):
            used.append(row)
    return rank(used, request.mode, request.registry)


def to_retime(
    known: Mapping[str, Row],
    stale: Collection[str],
    vendors: Sequence[VendorKernel],
    variants: Sequence[Variant],
    request: TuneRequest,
) -> tuple[Candidate, ...]:
    """Which stale rows decide whether an upgrade changed the order: plain SDPA's, the best two's,
    and the default's of the best family."""
    best = [ranked.slug for ranked in ranking(known.values(), request)]
    wanted = {BASELINE, *best[:1]}
    lacking = RETIMED - sum(slug not in stale for slug in best if slug != BASELINE)
    wanted.update([slug for slug in best if slug in stale][: max(0, lacking)])
    own = {v.slug: v for v in variants}
    first = next((own[slug] for slug in best if slug in own), None)
    if first is not None:
        wanted.add(next(v.slug for v in variants if v.family is first.family))
    every: Iterable[Candidate] = (*vendors, *variants)
    return tuple(c for c in every if c.slug in wanted and c.slug in stale)


def _undecided(known: Mapping[str, Row], request: TuneRequest) -> bool:
    """Whether what is best is so by the few samples of a screening."""
    order = ranking(known.values(), request)
    return bool(order) and is_screened(known[order[0].slug])
