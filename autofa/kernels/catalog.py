"""The variants of a family on an architecture: what `kernels` counts and `build` compiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autofa.device import Limits
from autofa.kernels.family import KernelFamily, Variant
from autofa.problem import Problem

# Head dims that stand for a range when a declaration gives one.
USUAL_HEAD_DIMS = (32, 40, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 576, 640, 768, 1024)


@dataclass(frozen=True)
class Listing:
    """The variants of one family on one architecture.

    Attributes:
        legal: the distinct variants that some problem may use, in declared order.
        total: distinct points of the space, legal or not.
        refused: reason -> how many points it refuses.
    """

    legal: tuple[Variant, ...]
    total: int
    refused: tuple[tuple[str, int], ...]


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


def listing(
    family: KernelFamily, limits: Limits, head_dims: Sequence[int] | None = None
) -> Listing:
    """Every variant of `family` for `limits`, over its dtypes, masks and head dims."""
    legal: dict[str, Variant] = {}
    total: set[str] = set()
    refused: dict[str, int] = {}
    for dtype in family.domain.dtypes:
        for mask in family.domain.masks:
            for dim in head_dims_of(family) if head_dims is None else head_dims:
                if dim not in family.domain.head_dims:
                    continue
                problem = _served(family, dtype, dim, mask, limits)
                for variant in family.points(problem):
                    total.add(variant.slug)
                    reason = variant.refusal(problem, limits)
                    if reason is None:
                        legal.setdefault(variant.slug, variant)
                    else:
                        refused[reason] = refused.get(reason, 0) + 1
    return Listing(tuple(legal.values()), len(total), tuple(sorted(refused.items())))
