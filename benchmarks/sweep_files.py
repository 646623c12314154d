"""Recorded sweeps: every point of one family's space at one problem, as lines of JSON.

The first line says what was measured, on what; each further one is a point: its slug and its time
over the default's of the same rounds, or the status with which it failed; or how the default stood
to plain SDPA in some rounds.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from autofa.device import Limits, named_limits
from autofa.kernels import REGISTRY
from autofa.kernels.family import KernelFamily, Variant
from autofa.kernels.vendor import BASELINE
from autofa.problem import Problem, parse_shape
from autofa.store.rows import Row

FORMAT = 1
FOLDER = Path(__file__).parent / "sweeps"


@dataclass(frozen=True)
class Space:
    """One family at one problem.

    Attributes:
        without: names of the family's constraints that are lifted, those that keep what is slow
            out and not what cannot run: a space as wide as a GPU's, on a CPU.
    """

    family: str
    shape: str
    dtype: str
    mask: str
    device: str
    without: tuple[str, ...] = ()

    @property
    def problem(self) -> Problem:
        return parse_shape(self.shape, dtype=self.dtype, mask=self.mask, device=self.device)

    @property
    def origin(self) -> KernelFamily:
        """The family as it is declared."""
        return REGISTRY.family(self.family)

    @cached_property
    def declared(self) -> KernelFamily:
        """The family with the constraints that hold here."""
        family = self.origin
        kept = tuple(c for c in family.constraints if c.name not in self.without)
        if len(kept) + len(self.without) != len(family.constraints):
            names = ", ".join(c.name for c in family.constraints)
            raise ValueError(f"{self.family} has no constraint among {self.without}, but {names}")
        return replace(family, constraints=kept)

    def variants(self, limits: Limits) -> list[Variant]:
        """Its points, the default first; those that sum in 16 bits too."""
        return self.declared.legal(self.problem, limits)

    @property
    def name(self) -> str:
        """Of its file, without the suffix."""
        shape = self.shape.replace("/", "-").replace(",", "x")
        wide = "-wide" if self.without else ""
        return f"{self.family}{wide}-{shape}-{self.dtype}-{self.mask}"


@dataclass(frozen=True)
class Sweep:
    """What was recorded of a space so far.

    Attributes:
        costs: slug -> log of its time over plain SDPA's; None for what failed.
        arch, units, features: of the device, for the limits that its points were legal under.
    """

    space: Space
    device: str
    arch: str
    units: int
    features: tuple[str, ...]
    costs: dict[str, float | None]

    @property
    def limits(self) -> Limits:
        known = named_limits(self.arch)
        return replace(known, units=self.units, features=frozenset(self.features))

    @property
    def missing(self) -> list[Variant]:
        return [v for v in self.space.variants(self.limits) if v.slug not in self.costs]


def heading(space: Space, device: str, limits: Limits, versions: dict[str, str]) -> str:
    """The first line of a recording."""
    about = {
        "format": FORMAT,
        "space": asdict(space),
        "device": device,
        "arch": limits.arch,
        "units": limits.units,
        "features": sorted(limits.features),
        **versions,
    }
    return json.dumps(about) + "\n"


def lines(rows: Sequence[Row], default: str, mode: str) -> str:
    """The points among these rows of one run, in which plain SDPA and the family's default were.

    Ratios are to the default, of the tenth percentiles: other work on the machine only ever slows,
    a sweep takes so long that there is some, and it slows kernels that share a way to use threads
    more alike than SDPA. How the default stands to SDPA is a line of its own per run.
    """
    quick = {row.slug: _quick(row, mode) for row in rows}
    sdpa, own = quick.get(BASELINE), quick.get(default)
    found: list[dict[str, object]] = []
    if sdpa and own:
        found.append({"default over sdpa": round(own / sdpa, 5)})
    for row in rows:
        taken = quick[row.slug]
        if row.slug == BASELINE:
            continue
        if row.status != "ok" or taken is None or not own:
            found.append({"slug": row.slug, "failed": row.status, "message": row.message[:200]})
        else:
            spread = row.spread(mode)
            found.append(
                {
                    "slug": row.slug,
                    "ratio": round(taken / own, 5),
                    "spread": None if spread is None else round(spread, 4),
                    "samples": row.samples,
                }
            )
    return "".join(json.dumps(point) + "\n" for point in found)


def _quick(row: Row, mode: str) -> float | None:
    return row.call_p10 if mode == "eager" else row.time_p10


def read(path: Path) -> Sweep:
    """A recording, complete or not; a last line that was cut off is passed over."""
    first, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True)
    about = json.loads(first)
    if about["format"] != FORMAT:
        raise ValueError(f"{path}: got format {about['format']}, supported {FORMAT}: record anew")
    space = Space(**{**about["space"], "without": tuple(about["space"]["without"])})
    over_default: dict[str, float | None] = {}
    over_sdpa: list[float] = []
    for line in rest:
        point = json.loads(line) if line.endswith("\n") else {}
        if "default over sdpa" in point:
            over_sdpa.append(math.log(point["default over sdpa"]))
        elif point:
            over_default[point["slug"]] = math.log(point["ratio"]) if "ratio" in point else None
    shift = statistics.median(over_sdpa) if over_sdpa else 0.0
    costs = {slug: None if c is None else c + shift for slug, c in over_default.items()}
    return Sweep(
        space, about["device"], about["arch"], about["units"], tuple(about["features"]), costs
    )


def read_all(folder: Path) -> list[tuple[Path, Sweep]]:
    """Every recording below a folder, in the order of their names."""
    return [(path, read(path)) for path in sorted(folder.rglob("*.jsonl"))]
