"""Where to look first, and where hardly: what was measured in buckets like this one, here or in the
shipped seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from autofa.kernels.family import Variant
from autofa.kernels.registry import Registry
from autofa.problem import Bucket, Problem, bucket_of
from autofa.store.ranking import rank
from autofa.store.rows import Row
from autofa.tuning.records import cost
from autofa.tuning.search import FAR_BEHIND

# How many per family are worth a trial before the search has learnt anything.
PER_FAMILY = 3
# How far, in octaves, a bucket may be for a family that is far behind there to be held for it here.
_LIKE = 3.0
_SIZES = ("batch", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")


def distance(a: Bucket, b: Bucket) -> float:
    """How unlike two buckets are: sizes in octaves, another dtype or mask as one octave each."""
    sizes = sum(abs(math.log2(getattr(a, n)) - math.log2(getattr(b, n))) for n in _SIZES)
    return sizes + (a.dtype != b.dtype) + (a.mask != b.mask)


class Hints:
    """The best variant of each family in each bucket known so far. Not thread-safe."""

    def __init__(self, registry: Registry, mode: str) -> None:
        self._registry = registry
        self._mode = mode
        self._best: dict[tuple[Bucket, str], Variant] = {}
        self._behind: dict[Bucket, dict[str, bool]] = {}

    def learn(self, rows: Iterable[Row]) -> None:
        """Takes rows of one or many buckets; a bucket seen before is answered by the newer."""
        buckets: dict[Bucket, list[Row]] = {}
        for row in rows:
            buckets.setdefault(row.bucket, []).append(row)
        for bucket, found in buckets.items():
            costs: dict[str, float] = {}
            for ranked in rank(found, self._mode, self._registry):
                variant = self._registry.find(ranked.slug)
                if isinstance(variant, Variant) and variant.family.name not in costs:
                    known = [value for row in ranked.rows if (value := cost(row)) is not None]
                    costs[variant.family.name] = fmean(known) if known else math.inf
                    self._best[bucket, variant.family.name] = variant
            least = min(costs.values(), default=math.inf)
            self._behind[bucket] = {
                family: least + FAR_BEHIND < value < math.inf for family, value in costs.items()
            }

    def behind(self, problem: Problem) -> frozenset[str]:
        """Families that are not worth a second trial for `problem` as long as nothing is measured:
        each was far behind another in the bucket most like it of those in which it was measured."""
        bucket = bucket_of(problem)
        found: dict[str, bool] = {}
        for other in sorted(self._behind, key=lambda other: (distance(other, bucket), other)):
            if distance(other, bucket) > _LIKE:
                break
            for family, far in self._behind[other].items():
                found.setdefault(family, far)
        return frozenset(family for family, far in found.items() if far)

    def near(self, problem: Problem) -> Sequence[Variant]:
        """Variants for `problem`, the likeliest first, at most `PER_FAMILY` of each family.
        Whether they are legal there is for the caller to ask."""
        bucket = bucket_of(problem)
        order = sorted(self._best.items(), key=lambda item: (distance(item[0][0], bucket), item[0]))
        found: dict[str, Variant] = {}
        count: dict[str, int] = {}
        for (_, family), variant in order:
            names = (param.name for param in variant.family.params)
            values = dict(zip(names, variant.values, strict=True))
            same = variant.family.variant(values, problem)
            if same.slug not in found and count.get(family, 0) < PER_FAMILY:
                found[same.slug] = same
                count[family] = count.get(family, 0) + 1
        return tuple(found.values())
