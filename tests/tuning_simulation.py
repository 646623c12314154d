"""A device that exists only in tests: families without code, and times that a function makes up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from autofa.bench.client import Entrant
from autofa.bench.protocol import Outcome, Plan, Timing, TimingRun
from autofa.compiler import Build
from autofa.device import DeviceKey, Limits
from autofa.errors import ToolchainError
from autofa.kernels import Registry
from autofa.kernels.family import Constraint, Domain, KernelFamily, Param, Params, Variant
from autofa.kernels.registry import Candidate
from autofa.kernels.vendor import VENDORS
from autofa.problem import Problem, parse_shape
from autofa.settings import Settings
from autofa.store.rows import Provenance
from autofa.tuning.building import Builder
from autofa.tuning.lab import Lab
from autofa.tuning.request import TuneRequest

DEVICE = DeviceKey("cpu", "Simulated CPU", "x86-64-v4", 8)
LIMITS = Limits("cpu", "x86-64-v4", 4, units=8)
PROBLEM = parse_shape("1,8,512,64", dtype="f32", device="cpu")
Times = Callable[[str, Problem], float]


def family(
    name: str,
    values: Mapping[str, tuple[int, ...]],
    illegal: Callable[[Params], bool] = lambda p: False,
) -> KernelFamily:
    """A family of these parameters; the default takes each one's first value."""
    return KernelFamily(
        name=name,
        title=name,
        version=1,
        folder=name.replace(".", "_"),
        entry="kernel.h",
        domain=Domain("cpu", ("f32",), masks=("none", "causal")),
        specialised=(),
        params=tuple(Param(param, choice, param + "x{}") for param, choice in values.items()),
        constraints=(
            Constraint("test", "the test says so", lambda p, problem, limits: not illegal(p)),
        ),
        target=lambda p, limits: limits.arch,
        default=lambda problem, limits: {param: choice[0] for param, choice in values.items()},
    )


@dataclass
class Simulation:
    """Times and failures of every candidate, and a record of what the tuner did.

    Attributes:
        times: `(slug, problem)` -> true milliseconds; `noise` is their relative deviation.
        check_fails, build_fails: slug -> status.
        built: slugs whose library is there before anything was compiled.
        compiler: False as where none is installed.
        version, torch, driver: the compiler's version, torch's, the driver's.
        samples: what all candidates had in all timings together.
        on_step: called before each check and each timing.
    """

    times: Times
    noise: float = 0.0
    check_fails: Mapping[str, str] = field(default_factory=dict)
    build_fails: Mapping[str, str] = field(default_factory=dict)
    built: set[str] = field(default_factory=set)
    compiler: bool = True
    version: str = "test-compiler 1"
    torch: str = "2"
    driver: str = ""
    on_step: Callable[[], None] = lambda: None
    overlap: bool = False
    checked: list[tuple[str, Problem]] = field(default_factory=list)
    timed: list[tuple[str, Problem]] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    samples: int = 0
    closed: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(0))

    # The measurer

    def check(
        self, candidate: Candidate, library: Path | None, problem: Problem, **how: object
    ) -> Outcome:
        self.on_step()
        assert (library is not None) == isinstance(candidate, Variant)
        self.checked.append((candidate.slug, problem))
        status = self.check_fails.get(candidate.slug, "ok")
        return Outcome(candidate.slug, status, "" if status == "ok" else "as told", error=1e-6)

    def _timing(self, slug: str, problem: Problem, rounds: int) -> Timing:
        ms = self.times(slug, problem) * (1 + self.noise * self.random.gauss(0, 1) / rounds**0.5)
        spread = self.noise / rounds**0.5
        return Timing(ms, ms, spread, spread, (ms, ms), (ms, ms), rounds)

    def time(
        self, entrants: Sequence[Entrant], problem: Problem, plan: Plan | None = None, **how: object
    ) -> TimingRun:
        self.on_step()
        rounds = (plan or Plan()).max_rounds
        baseline = self._timing("torch.sdpa", problem, rounds)
        outcomes = []
        for entrant in entrants:
            slug = entrant.candidate.slug
            self.timed.append((slug, problem))
            self.samples += rounds
            own = baseline if slug == "torch.sdpa" else self._timing(slug, problem, rounds)
            outcomes.append(Outcome(slug, "ok", timing=own, baseline=baseline))
        return TimingRun(tuple(outcomes), rounds, True, "{}")

    def close(self) -> None:
        self.closed += 1

    # The compiler

    def build(
        self,
        requests: Sequence[tuple[Variant, str]],
        settings: Settings,
        *,
        jobs: int | None = None,
        on_done: Callable[[Build], None] | None = None,
    ) -> list[Build]:
        if not self.compiler:
            raise ToolchainError("no compiler in this test")
        done = []
        for variant, target in requests:
            self.compiled.append(variant.slug)
            status = self.build_fails.get(variant.slug, "ok")
            library = Path(f"{variant.slug}.so") if status == "ok" else None
            if library is not None:
                self.built.add(variant.slug)
            done.append(Build(variant, target, status, library))
            if on_done is not None:
                on_done(done[-1])
        return done

    def library_of(self, variant: Variant, target: str, settings: Settings) -> Path | None:
        return Path(f"{variant.slug}.so") if variant.slug in self.built else None

    @property
    def today(self) -> Provenance:
        began = "2026-01-01T00:00:00Z"
        return Provenance("0", self.torch, "", self.driver, self.version, "host", began)

    @contextmanager
    def laboratory(self, request: TuneRequest) -> Iterator[Lab]:
        builder = Builder(LIMITS, request.settings, 1, self.build, self.library_of)
        if not self.compiler:
            builder.problem = "no compiler in this test"
        try:
            yield Lab(
                device=DEVICE,
                limits=LIMITS,
                today=self.today,
                measurer=self,
                builder=builder,
                fingerprint=lambda variant, target: f"fp-{variant.slug}",
                overlap=self.overlap,
            )
        finally:
            self.close()


def registry(*families: KernelFamily) -> Registry:
    return Registry(families, VENDORS)
