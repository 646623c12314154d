"""How far shapes are apart, and how alike kernels are that were made for them. Pure: no torch.

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

# Of `sizes`, what differs no more from less, and what little from more: by so much an octave.
_FEWEST = {"cuda": (1, 16, 1), "cpu": (1, 1, 1)}
_MOST = {"cuda": (1 << 17, 128, 1 << 13), "cpu": (1 << 13, 64, 1 << 12)}
_BEYOND = 0.25
# What differences of kind count for, in octaves of size. The half-precision dtypes run at one rate
# on a GPU.
_OTHER_DTYPE = 0.5
_OTHER_MASK = 1.5
_HEAD_DIM_OCTAVE = 2.0
# A neighbour's say falls with a power of its distance; the nearest has no infinite one.
_NEAR = 0.3
_POWER = 3
# Fused backends of SDPA end at this head dim; beyond it another kernel answers.
_WIDEST_FUSED = 256
# What a value that is another counts for, and one that is another but the default's in both.
_OTHER = 1.0
_BOTH_DEFAULT = 0.3


def sizes(bucket: Bucket) -> tuple[float, float, float]:
    """Rows of all heads, rows of one head, and keys, in octaves. More rows than fill the device a
    few times, or a tile, and more keys than hide what comes before and after them, make little
    difference, and count less."""
    rows = bucket.batch * bucket.heads_q * bucket.seqlen_q
    least, most = _FEWEST[bucket.device], _MOST[bucket.device]
    return (
        _octaves(rows, least[0], most[0]),
        _octaves(bucket.seqlen_q, least[1], most[1]),
        _octaves(bucket.seqlen_k, least[2], most[2]),
    )


def _octaves(value: int, least: int, most: int) -> float:
    within = math.log2(min(max(value, least), most))
    return within + _BEYOND * (math.log2(max(value, least)) - within)


def distance(one: Bucket, other: Bucket) -> float:
    """How far apart two buckets are, in octaves; infinite where one tells nothing of the other."""
    if _kind(one) != _kind(other):
        return math.inf
    found = math.fsum(abs(a - b) for a, b in zip(sizes(one), sizes(other), strict=True))
    found += _HEAD_DIM_OCTAVE * abs(math.log2(one.head_dim / other.head_dim))
    found += abs(math.log2(_group(one) / _group(other)))
    found += _OTHER_MASK * (one.mask != other.mask)
    return found + _OTHER_DTYPE * (one.dtype != other.dtype)


def _group(bucket: Bucket) -> float:
    return bucket.heads_q / bucket.heads_kv


def _kind(bucket: Bucket) -> tuple[object, ...]:
    b = bucket
    fused = b.device == "cpu" or max(b.head_dim, b.head_dim_v) <= _WIDEST_FUSED
    dtype = "half" if b.device == "cuda" and b.dtype != "f32" else b.dtype
    # SDPA has other backends for causal masks where the lengths differ.
    mask = "none or causal" if b.mask == "none" else b.mask
    if b.mask == "causal" and b.seqlen_q == b.seqlen_k:
        mask = "none or causal"
    wider = b.head_dim_v / b.head_dim
    return b.device, dtype, mask, wider, fused


def nearness(far: float) -> float:
    """The weight of a sample at that distance."""
    return 1.0 / (_NEAR + far) ** _POWER


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
