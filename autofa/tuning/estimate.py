"""How long the rest takes: a rough prior per bucket, scaled by what finished work really cost."""

from __future__ import annotations

from dataclasses import dataclass

from autofa.problem import Problem

# Seconds, as a first guess, per device kind: one compilation (all jobs together), one check, one
# candidate's timing, one bucket's precise rounds. Finished buckets correct it from the first on.
_PRIOR = {"cpu": (2.0, 0.4, 0.5, 4.0), "cuda": (0.2, 0.05, 0.08, 1.2)}
# Operations per second at which references in double precision are computed.
_REFERENCE = {"cpu": 2e10, "cuda": 1e13}


@dataclass(frozen=True)
class Load:
    """What a bucket still needs: candidates to check and time, of which some must be compiled."""

    problem: Problem
    candidates: int
    builds: int

    @property
    def prior_s(self) -> float:
        kind = self.problem.device
        build, check, screen, final = _PRIOR[kind]
        reference = self.problem.flops / _REFERENCE[kind]
        return self.builds * build + self.candidates * (check + screen) + reference + final


class Estimator:
    """Seconds to go. Not thread-safe."""

    def __init__(self) -> None:
        self._predicted = 0.0
        self._spent = 0.0

    def finished(self, load: Load, seconds: float) -> None:
        """A bucket is over, and took so long."""
        self._predicted += load.prior_s
        self._spent += seconds

    def seconds(self, load: Load) -> float:
        """What a bucket will take. The prior counts as much as half a bucket of experience."""
        weight = load.prior_s / 2
        scale = (self._spent + weight) / (self._predicted + weight) if weight else 1.0
        return load.prior_s * scale

    def remaining(self, loads: list[Load]) -> float:
        return sum(self.seconds(load) for load in loads)
