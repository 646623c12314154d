"""A head-to-head of kernels at one shape: built, checked and timed side by side. Stores nothing."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autofa.bench import memory
from autofa.bench.client import Entrant
from autofa.bench.protocol import Outcome, Plan
from autofa.errors import UsageError, explain_bad
from autofa.kernels import Candidate, Registry
from autofa.kernels.family import Variant
from autofa.problem import Problem
from autofa.store.rows import Row
from autofa.tuning.lab import Lab
from autofa.tuning.records import conditions_of, record

_UNFUSED = "torch.unfused"


@dataclass(frozen=True)
class Result:
    """What became of one kernel, as a row, and the first values of its output."""

    row: Row
    values: tuple[float, ...]


@dataclass(frozen=True)
class Field:
    """Which kernels take part. Plain SDPA is always timed; it is shown where `sdpa` says so.

    Attributes:
        sdpa: SDPA and its single backends, and other libraries' kernels.
        unfused: the unfused form.
        select: only kernels whose slug matches this glob, whatever else is said.
    """

    sdpa: bool = False
    unfused: bool = False
    select: str | None = None

    def has(self, candidate: Candidate) -> bool:
        if self.select is not None:
            return fnmatch.fnmatch(candidate.slug, self.select)
        if isinstance(candidate, Variant):
            return True
        return self.unfused if candidate.slug == _UNFUSED else self.sdpa


def contestants(problem: Problem, lab: Lab, registry: Registry, field: Field) -> list[Candidate]:
    """The kernels to compare, vendors first.

    Raises:
        UsageError: none is legal here.
    """
    legal = registry.legal(problem, lab.limits)
    found = [c for c in legal if field.has(c)]
    if not found:
        got = field.select if field.select is not None else f"no own kernel for {problem.shape}"
        do = "choose one of these with --kernels, or add --sdpa"
        raise UsageError(explain_bad("kernels", got, ", ".join(c.slug for c in legal), do))
    return found


def contest(
    problem: Problem,
    candidates: list[Candidate],
    lab: Lab,
    plan: Plan,
    *,
    thorough: bool,
    on_step: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Compiles what is missing, checks each kernel, and times all of them in common rounds.

    Returns one result per candidate, in their order; failures are results too.

    Args:
        thorough: also check ragged lengths, other strides, grouped heads and large scores.
        on_step: told what is being done, for people.

    Raises:
        UsageError: the problem does not fit into memory; before any work.
        LaunchError: the measuring process cannot start, or memory does not suffice after all.
    """
    refused = memory.refusal(problem, lab.device)
    if refused is not None:
        raise UsageError(refused)
    variants = [c for c in candidates if isinstance(c, Variant)]
    checked: dict[str, Outcome] = {}
    libraries: dict[str, Path] = {}
    if variants:
        on_step(f"compiling what is missing of {len(variants)} variants")
    for built in lab.builder.take(variants, lambda: None):
        slug = built.variant.slug
        if built.library is None:
            checked[slug] = Outcome(slug, built.status, built.message, seconds=built.seconds)
        else:
            libraries[slug] = built.library
    for variant in variants:
        if variant.slug not in libraries and variant.slug not in checked:
            checked[variant.slug] = Outcome(variant.slug, "compile_error", lab.builder.problem)
    for candidate in candidates:
        slug = candidate.slug
        if slug not in checked:
            on_step(f"checking {slug}")
            checked[slug] = lab.measurer.check(
                candidate, libraries.get(slug), problem, thorough=thorough
            )
    sound = [Entrant(c, libraries.get(c.slug)) for c in candidates if checked[c.slug].ok]
    on_step(f"timing {len(sound)} kernels")
    run = lab.measurer.time(sound, problem, plan)
    timed = {outcome.slug: outcome for outcome in run.outcomes}
    results = []
    for candidate in candidates:
        seen = checked[candidate.slug]
        outcome = timed[candidate.slug] if seen.ok else seen
        row = record(
            lab,
            problem,
            candidate,
            outcome,
            run="contest",
            error=seen.error,
            conditions=conditions_of(run, final=True),
        )
        results.append(Result(row, seen.values))
    return results
