"""The variants of a family on an architecture: what `kernels` counts and `build` compiles."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autofa.device import Limits
from autofa.kernels.family import KernelFamily, Params, Variant
from autofa.problem import Problem

# Head dims that stand for a range when a declaration gives one.
USUAL_HEAD_DIMS = (32, 40, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 576, 640, 768, 1024)


@dataclass(frozen=True)
class Listing:
    """The variants of one family on one architecture.

    Attributes:
        points: of each distinct variant that some problem may use: its values, and that problem.
        total: distinct points of the space, legal or not.
        refused: reason -> how many points it refuses.
    """

    family: KernelFamily
    points: tuple[tuple[Params, Problem], ...]
    total: int
    refused: tuple[tuple[str, int], ...]

    @property
    def legal(self) -> list[Variant]:
        """The variants, in declared order."""
        return [self.family.variant(vars(params), problem) for params, problem in self.points]


def head_dims_of(family: KernelFamily) -> tuple[int, ...]:
    """The head dims to enumerate: all that are listed, or the usual ones of a range."""
    dims = family.domain.head_dims
    return dims.listed or tuple(d for d in USUAL_HEAD_DIMS if d in dims)


def _served(family: KernelFamily, dtype: str, dim: int, mask: str, limits: Limits) -> Problem:
    """A long problem; with one query if the family serves only those."""
    long = Problem(dtype, 1, 8, 8, 1024, 1024, dim, dim, mask, family.domain.device)
    one_query = replace(long, seqlen_q=1)
    refusals = (family.domain.refusal(p, limits) for p in (long, one_query))
    return one_query if [r is None for r in refusals] == [False, True] else long


# (seqlen_q, seqlen_k): one query, short, and long enough to fill a small and a large GPU.
_USUAL_LENGTHS = ((1, 8192), (128, 128), (1024, 1024), (8192, 8192))
_USUAL_MASKS = ("none", "causal")
# An architecture by name has no number of SMs; with this one, both kinds of defaults are met.
_USUAL_UNITS = 108


def defaults(family: KernelFamily, limits: Limits) -> tuple[Variant, ...]:
    """The variants that calls of usual shapes get unmeasured: no explicit masks."""
    if limits.kind == "cuda":
        limits = replace(limits, units=max(limits.units, _USUAL_UNITS))
    found: dict[str, Variant] = {}
    for dtype in family.domain.dtypes:
        for mask in _USUAL_MASKS:
            for dim in head_dims_of(family):
                for seqlen_q, seqlen_k in _USUAL_LENGTHS:
                    sizes = (1, 8, 8, seqlen_q, seqlen_k, dim, dim)
                    problem = Problem(dtype, *sizes, mask, family.domain.device)
                    variant = family.default_variant(problem, limits)
                    if variant is not None:
                        found.setdefault(variant.slug, variant)
    return tuple(found.values())


def listing(
    family: KernelFamily, limits: Limits, head_dims: Sequence[int] | None = None
) -> Listing:
    """Every variant of `family` for `limits`, over its dtypes, masks and head dims.

    A family has up to a million points, so this asks the constraints and makes no `Variant`.
    """
    legal: dict[tuple[object, ...], tuple[Params, Problem]] = {}
    kinds: set[tuple[object, ...]] = set()
    refused: Counter[str] = Counter()
    dims = head_dims_of(family) if head_dims is None else head_dims
    domain = family.domain
    for dtype, mask, dim in itertools.product(domain.dtypes, domain.masks, dims):
        if dim not in domain.head_dims:
            continue
        problem = _served(family, dtype, dim, mask, limits)
        kind = tuple(getattr(problem, name) for name in family.specialised)
        kinds.add(kind)
        reason = domain.refusal(problem, limits)
        if reason is not None:
            refused[reason] += len(family.space)
            continue
        for point, params in enumerate(family.space):
            broken = family.broken(params, problem, limits)
            if broken is None:
                legal.setdefault((kind, point), (params, problem))
            else:
                refused[f"{broken.name}: {broken.reason}"] += 1
    total = len(kinds) * len(family.space)
    return Listing(family, tuple(legal.values()), total, tuple(sorted(refused.items())))
