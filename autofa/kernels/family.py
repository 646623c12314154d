"""What a kernel family is: parameters, constraints and domain as data, from which all else follows.

The compiler, the tuner, the database, the dispatcher and the report read this one declaration; a
family's parameters are known nowhere else. A `Variant` is a family with one value per parameter,
and its slug (`mma.split_q-d64-m64n64-w4-s2-f32-bf16-causal`) names it in every file, row and log.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

from autofa.device import Limits
from autofa.errors import UsageError, explain_bad
from autofa.problem import MASKS, Problem

Value = int | str
# Parameter values as attributes (`p.block_m`), as predicates and size formulas read them.
Params = SimpleNamespace


@dataclass(frozen=True)
class Param:
    """One tunable parameter, a compile-time constant of the kernel.

    Attributes:
        name: the constant's name in the stub's `Params` struct.
        values: what it may be, in order of growing cost; ints, or names that abi.h enumerates.
        label: its piece of the slug, `{}` standing for the value.
        joined: True glues the piece to the one before it (`m64n64`).
        about: one line for people.
    """

    name: str
    values: tuple[Value, ...]
    label: str = "{}"
    joined: bool = False
    about: str = ""


@dataclass(frozen=True)
class Constraint:
    """A named rule with its reason; `holds(params, problem, limits)` decides a point's legality."""

    name: str
    reason: str
    holds: Callable[[Params, Problem, Limits], bool]


@dataclass(frozen=True)
class HeadDims:
    """Which head dims a kernel serves: multiples of `step` from `first` to `last`, or `listed`."""

    listed: tuple[int, ...] = ()
    step: int = 1
    first: int = 1
    last: int = 65536

    def __contains__(self, head_dim: object) -> bool:
        if self.listed:
            return head_dim in self.listed
        return (
            isinstance(head_dim, int)
            and self.first <= head_dim <= self.last
            and head_dim % self.step == 0
        )

    def __str__(self) -> str:
        if self.listed:
            return ", ".join(map(str, self.listed))
        kind = "any" if self.step == 1 else f"multiples of {self.step}"
        return f"{kind}, {self.first} ... {self.last}"


@dataclass(frozen=True)
class Domain:
    """What a candidate can serve. Everything it does not say is refused.

    Attributes:
        alignment: bytes that base pointers and row strides must be multiples of.
        min_arch, max_arch: GPU capability (10 * major + minor) or x86-64 level, both inclusive.
        gqa: fewer key heads than query heads.
        unequal_lengths: seqlen_q != seqlen_k; `unequal_causal` the same under a causal mask.
        unequal_head_dims: head_dim != head_dim_v.
        deterministic: the same bits for the same input, always.
        extra: a further rule with its reason, on the problem and the device.
    """

    device: str
    dtypes: tuple[str, ...]
    head_dims: HeadDims = HeadDims()
    masks: tuple[str, ...] = MASKS
    min_arch: int = 0
    max_arch: int = 10**6
    alignment: int = 1
    gqa: bool = True
    unequal_lengths: bool = True
    unequal_causal: bool = True
    unequal_head_dims: bool = True
    deterministic: bool = True
    extra: tuple[Constraint, ...] = ()

    def arch_refusal(self, limits: Limits) -> str | None:
        """Why no problem is served on that device of the domain's kind; None if some may be."""
        if limits.capability < self.min_arch:
            return f"needs architecture {self.min_arch} or newer"
        if limits.capability > self.max_arch:
            return f"not made for architectures above {self.max_arch}"
        return None

    def refusal(self, problem: Problem, limits: Limits) -> str | None:
        """Why this problem is not served there; None if it is."""
        p = problem
        if not limits.kind == self.device == p.device:
            return f"runs on {self.device} only"
        arch_refusal = self.arch_refusal(limits)
        if arch_refusal is not None:
            return arch_refusal
        checks: tuple[tuple[bool, str], ...] = (
            (p.dtype in self.dtypes, f"dtype {p.dtype} is not one of {', '.join(self.dtypes)}"),
            (p.head_dim in self.head_dims, f"head_dim {p.head_dim} is not in {self.head_dims}"),
            (p.head_dim_v in self.head_dims, f"head_dim_v {p.head_dim_v} not in {self.head_dims}"),
            (p.mask in self.masks, f"mask {p.mask} is not one of {', '.join(self.masks)}"),
            (self.gqa or p.heads_q == p.heads_kv, "has no grouped heads"),
            (self.unequal_lengths or p.seqlen_q == p.seqlen_k, "needs seqlen_q == seqlen_k"),
            (
                self.unequal_causal or not p.causal or p.seqlen_q == p.seqlen_k,
                "causal needs seqlen_q == seqlen_k",
            ),
            (
                self.unequal_head_dims or p.head_dim == p.head_dim_v,
                "needs head_dim == head_dim_v",
            ),
        )
        for ok, reason in checks:
            if not ok:
                return reason
        for rule in self.extra:
            if not rule.holds(SimpleNamespace(), problem, limits):
                return rule.reason
        return None


def _zero(params: Params, problem: Problem) -> int:
    return 0


def _never(problem: Problem, limits: Limits) -> bool:
    return False


@dataclass(frozen=True, eq=False)
class KernelFamily:
    """One kernel template and all that is known about it.

    Attributes:
        name: dotted, e.g. `mma.split_q`.
        title: the customary form, e.g. `mma(split-q)`.
        version: raised when results of older builds must not be compared with.
        folder: under `csrc/kernels`; its namespace, and the folder of `entry`.
        entry: the header that defines `Kernel<Params>`.
        domain: what it serves.
        params: in slug order.
        constraints: legality of a point beyond the domain.
        specialised: which of `dtype, head_dim, mask` are compiled in; the rest are run-time.
        target: `(params, limits)` -> build target, e.g. `sm_90a` or `x86-64-v4`.
        default: `(problem, limits)` -> parameter values, constant time, always legal in the domain.
        unmeasured: `(problem, limits)` -> whether the default may answer with no measurement.
        smem_bytes, threads: `(params, problem)` -> what the stub asserts the kernel to use.
        root: the source tree; None is the shipped `csrc/`.
    """

    name: str
    title: str
    version: int
    folder: str
    entry: str
    domain: Domain
    params: tuple[Param, ...]
    target: Callable[[Params, Limits], str]
    default: Callable[[Problem, Limits], dict[str, Value]]
    constraints: tuple[Constraint, ...] = ()
    specialised: tuple[str, ...] = ("dtype", "head_dim", "mask")
    unmeasured: Callable[[Problem, Limits], bool] = _never
    smem_bytes: Callable[[Params, Problem], int] = _zero
    threads: Callable[[Params, Problem], int] = _zero
    root: Path | None = field(default=None)

    def variant(self, values: dict[str, Value], problem: Problem) -> Variant:
        """The variant with these parameter values, specialised as `problem` needs.

        Raises:
            UsageError: a value outside the declared space.
        """
        for param in self.params:
            if values.get(param.name) not in param.values:
                allowed = ", ".join(map(str, param.values))
                got = values.get(param.name)
                raise UsageError(
                    explain_bad(f"{self.name} {param.name}", got, allowed, "choose one of these")
                )
        return Variant(
            self,
            tuple(values[param.name] for param in self.params),
            problem.dtype if "dtype" in self.specialised else None,
            problem.head_dim if "head_dim" in self.specialised else None,
            problem.mask if "mask" in self.specialised else None,
        )

    @cached_property
    def space(self) -> tuple[Params, ...]:
        """The values of every point, legal or not, in declared order."""
        names = [param.name for param in self.params]
        every = itertools.product(*(param.values for param in self.params))
        return tuple(Params(**dict(zip(names, values, strict=True))) for values in every)

    def broken(self, params: Params, problem: Problem, limits: Limits) -> Constraint | None:
        """The first constraint that a point breaks there."""
        for constraint in self.constraints:
            if not constraint.holds(params, problem, limits):
                return constraint
        return None

    def points(self, problem: Problem) -> Iterator[Variant]:
        """Every point of the declared space, legal or not, in declared order."""
        for params in self.space:
            yield self.variant(vars(params), problem)

    def legal(self, problem: Problem, limits: Limits) -> list[Variant]:
        """The variants that may be built and measured for `problem` there; the default first."""
        if self.domain.refusal(problem, limits) is not None:
            return []
        # A family has thousands of points: a `Variant` is made of the legal ones only.
        found = [
            self.variant(vars(params), problem)
            for params in self.space
            if self.broken(params, problem, limits) is None
        ]
        default = self.default_variant(problem, limits)
        return sorted(found, key=lambda v: v != default)

    def default_variant(self, problem: Problem, limits: Limits) -> Variant | None:
        """The variant that serves an untuned machine; None outside the domain."""
        if self.domain.refusal(problem, limits) is not None:
            return None
        return self.variant(self.default(problem, limits), problem)

    @cached_property
    def _slug_pattern(self) -> re.Pattern[str]:
        pieces = [re.escape(self.name)]
        if "head_dim" in self.specialised:
            pieces.append(r"-d(?P<head_dim_>[0-9]{1,5})")
        for param in self.params:
            before, _, after = param.label.partition("{}")
            allowed = "|".join(re.escape(str(v)) for v in param.values)
            pieces.append(
                f"{'' if param.joined else '-'}{re.escape(before)}"
                f"(?P<{param.name}>{allowed}){re.escape(after)}"
            )
        if "dtype" in self.specialised:
            pieces.append(f"-(?P<dtype_>{'|'.join(self.domain.dtypes)})")
        if "mask" in self.specialised:
            pieces.append(f"-(?P<mask_>{'|'.join(self.domain.masks)})")
        return re.compile("".join(pieces))

    def parse(self, slug: str) -> Variant | None:
        """The variant that a slug names; None if it is not one of today's declared space."""
        match = self._slug_pattern.fullmatch(slug)
        if match is None:
            return None
        found = match.groupdict()
        values = []
        for param in self.params:
            typed = {str(value): value for value in param.values}
            values.append(typed[found[param.name]])
        head_dim = found.get("head_dim_")
        if head_dim is not None and int(head_dim) not in self.domain.head_dims:
            return None
        return Variant(
            self,
            tuple(values),
            found.get("dtype_"),
            int(head_dim) if head_dim is not None else None,
            found.get("mask_"),
        )


@dataclass(frozen=True)
class Variant:
    """One point of a family's space: a candidate, and one shared library per build target.

    `dtype`, `head_dim` and `mask` are set where the family compiles them in.
    """

    family: KernelFamily
    values: tuple[Value, ...]
    dtype: str | None
    head_dim: int | None
    mask: str | None

    @cached_property
    def params(self) -> Params:
        names = (param.name for param in self.family.params)
        return SimpleNamespace(**dict(zip(names, self.values, strict=True)))

    @cached_property
    def slug(self) -> str:
        pieces = [self.family.name]
        if self.head_dim is not None:
            pieces.append(f"-d{self.head_dim}")
        for param, value in zip(self.family.params, self.values, strict=True):
            pieces.append(("" if param.joined else "-") + param.label.format(value))
        pieces += [f"-{part}" for part in (self.dtype, self.mask) if part is not None]
        return "".join(pieces)

    @property
    def title(self) -> str:
        """The customary form, `mma(split-q+stage2)`."""
        stages = getattr(self.params, "stages", None)
        if stages is None or not self.family.title.endswith(")"):
            return self.family.title
        return f"{self.family.title[:-1]}+stage{stages})"

    @property
    def family_name(self) -> str:
        return self.family.name

    def accuracy(self, dtype: str) -> str:
        """Its accuracy class: `f32`, or `fast` where it accumulates in less."""
        return "f32" if getattr(self.params, "accumulate", "f32") == "f32" else "fast"

    def target(self, limits: Limits) -> str:
        """What it is compiled for on a device with these limits."""
        return self.family.target(self.params, limits)

    def refusal(self, problem: Problem, limits: Limits) -> str | None:
        """Why this variant may not serve `problem` there; None if it may."""
        reason = self.family.domain.refusal(problem, limits)
        if reason is not None:
            return reason
        for own, theirs in (
            (self.dtype, problem.dtype),
            (self.head_dim, problem.head_dim),
            (self.mask, problem.mask),
        ):
            if own is not None and own != theirs:
                return f"compiled for {own}, not {theirs}"
        broken = self.family.broken(self.params, problem, limits)
        return f"{broken.name}: {broken.reason}" if broken is not None else None

    def __str__(self) -> str:
        return self.slug
