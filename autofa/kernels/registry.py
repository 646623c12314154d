"""All candidates there are, by slug and by problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from autofa.device import CUDA_ARCHS, Limits, cpu_limits, cuda_limits
from autofa.errors import UsageError, explain_bad
from autofa.kernels.family import KernelFamily, Variant
from autofa.kernels.vendor import BASELINE, VendorKernel
from autofa.problem import Problem

Candidate = Variant | VendorKernel


def _example(family: KernelFamily) -> str:
    """The slug of one of its variants."""
    domain = family.domain
    if domain.device == "cpu":
        limits = cpu_limits()
    else:
        known = map(cuda_limits, CUDA_ARCHS)
        limits = next(one for one in known if one.capability >= domain.min_arch)
    usual = (64, 128, domain.head_dims.first, *domain.head_dims.listed)
    dim = next(d for d in usual if d in domain.head_dims)
    problem = Problem(
        domain.dtypes[0], 1, 8, 8, 1024, 1024, dim, dim, domain.masks[0], domain.device
    )
    return family.variant(family.default(problem, limits), problem).slug


@dataclass(frozen=True)
class Registry:
    """The families and vendor kernels in play. Pure data; share it between threads freely."""

    families: tuple[KernelFamily, ...]
    vendors: tuple[VendorKernel, ...]

    def find(self, slug: str) -> Candidate | None:
        """The candidate of that slug; None if today's declarations have none."""
        for vendor in self.vendors:
            if vendor.slug == slug:
                return vendor
        for family in self.families:
            if slug.startswith(family.name + "-"):
                variant = family.parse(slug)
                if variant is not None:
                    return variant
        return None

    def candidate(self, slug: str) -> Candidate:
        """The candidate of that slug.

        Raises:
            UsageError: today's declarations have none.
        """
        found = self.find(slug)
        if found is None:
            raise UsageError(self._unknown(slug))
        return found

    def _unknown(self, slug: str) -> str:
        """What is wrong with a slug that names no candidate."""
        vendors = [vendor.slug for vendor in self.vendors]
        supported = ", ".join(vendors + [f"{family.name}-..." for family in self.families])
        own = {family.name: family for family in self.families}
        family = next((f for f in own.values() if f"{slug}-".startswith(f"{f.name}-")), None)
        near = get_close_matches(slug, [*vendors, *own], n=1)
        do = f"did you mean {near[0]}?" if near else "`autofa kernels` lists them"
        if family is None and near:
            family = own.get(near[0])
        if family is not None:
            do = f"name a whole slug, such as {_example(family)}"
        return explain_bad("kernel", slug, supported, do)

    def family(self, name: str) -> KernelFamily:
        """The family of that name.

        Raises:
            UsageError: there is none.
        """
        for family in self.families:
            if family.name == name:
                return family
        names = ", ".join(f.name for f in self.families)
        raise UsageError(explain_bad("family", name, names, "`autofa kernels` lists them"))

    def legal(
        self, problem: Problem, limits: Limits, families: Sequence[str] | None = None
    ) -> list[Candidate]:
        """Every candidate that may serve `problem` there: the baseline first, then the vendors,
        then each family's variants, its default first."""
        found: list[Candidate] = [
            v
            for v in self.vendors
            if v.refusal(problem, limits) is None and v.version() is not None
        ]
        for family in self.families:
            if families is None or family.name in families:
                found += family.legal(problem, limits)
        return found

    def simplicity(self, slug: str) -> tuple[int, int, str]:
        """Sort key: the smaller, the simpler. Decides ties, so it never depends on measurement."""
        if slug == BASELINE:
            return (0, 0, slug)
        for index, vendor in enumerate(self.vendors):
            if vendor.slug == slug:
                return (1, index, slug)
        variant = self.find(slug)
        if not isinstance(variant, Variant):
            return (3, 0, slug)
        # Parameter values are declared in order of growing cost.
        cost = sum(
            param.values.index(value)
            for param, value in zip(variant.family.params, variant.values, strict=True)
        )
        return (2, cost, slug)
