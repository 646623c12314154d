"""How alike two kernels are that were made for different shapes. Pure: no torch.

Much of what a kernel is follows from its shape: the columns that a head dim fills, the stages that
then fit. A family's default says what does. So a value is looked at beside the default's for the
same shape: two kernels agree in it where it is equal, and nearly where both have the default's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autofa.device import Limits
from autofa.kernels import Candidate
from autofa.kernels.family import KernelFamily, Value, Variant
from autofa.problem import Bucket

# What a value that is another counts for, and one that is another but the default's in both.
_OTHER = 1.0
_BOTH_DEFAULT = 0.3


@dataclass(frozen=True)
class Traits:
    """A candidate as it compares with others of its group.

    Attributes:
        group: its family, or a vendor's slug: of another group nothing is learnt.
        values: each parameter's, and whether it is the default's there; none for vendors.
    """

    candidate: Candidate
    group: str
    values: tuple[tuple[Value, bool], ...] = ()


class Carrier:
    """Kernels of one device between its buckets; the defaults there are asked for once."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._defaults: dict[tuple[str, Bucket], Variant | None] = {}

    def default(self, family: KernelFamily, bucket: Bucket) -> Variant | None:
        key = family.name, bucket
        if key not in self._defaults:
            self._defaults[key] = family.default_variant(bucket.problem, self.limits)
        return self._defaults[key]

    def traits(self, candidate: Candidate, bucket: Bucket) -> Traits:
        """Of a candidate that serves `bucket`."""
        if not isinstance(candidate, Variant):
            return Traits(candidate, candidate.slug)
        default = self.default(candidate.family, bucket)
        usual = default.values if default is not None else (None,) * len(candidate.values)
        values = tuple(
            (own, own == theirs) for own, theirs in zip(candidate.values, usual, strict=True)
        )
        return Traits(candidate, candidate.family.name, values)

    def carried(
        self, known: Traits, bucket: Bucket, usable: Callable[[Candidate], bool]
    ) -> Candidate | None:
        """The same kernel in `bucket`: with the default's values where it had those, else with its
        own; None where neither may serve it."""
        candidate = known.candidate
        if not isinstance(candidate, Variant):
            return candidate if usable(candidate) else None
        default = self.default(candidate.family, bucket)
        if default is None:
            return None
        names = [param.name for param in candidate.family.params]
        follows = (
            d if usual else own
            for (own, usual), d in zip(known.values, default.values, strict=True)
        )
        for values in dict.fromkeys((tuple(follows), candidate.values)):
            found = candidate.family.variant(dict(zip(names, values, strict=True)), bucket.problem)
            if usable(found):
                return found
        return None


def likeness(one: Traits, other: Traits) -> float:
    """Of two candidates of one group: 1 if they are the same, and less the more values differ."""
    unlike = 0.0
    for (a, usual_a), (b, usual_b) in zip(one.values, other.values, strict=True):
        if a != b:
            unlike += _BOTH_DEFAULT if usual_a and usual_b else _OTHER
    return math.exp(-unlike)
