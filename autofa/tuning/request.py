"""What a tune is asked for, and the checks that are made before any work."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autofa.errors import UsageError, explain_bad
from autofa.kernels import REGISTRY, Registry
from autofa.problem import Problem, check, parse_dtype, parse_shape
from autofa.settings import Settings, database
from autofa.store.reader import sqlite_path
from autofa.tuning.profile_files import find_profile

MODES = ("eager", "graph")
DEFAULT_PROFILE = "default"
DEFAULT_TRIALS = 16
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class TuneRequest:
    """One tune. `tuning.session.tune` takes it as it is.

    Attributes:
        problems: what to measure, exactly these shapes, in order of importance.
        device: as torch writes it, e.g. `cuda:0` or `cpu`.
        db: path or URL of the database.
        mode: `eager` ranks by call_ms, `graph` by time_ms.
        budget_s: wall time of the whole tune in seconds; None has no end.
        trials: own variants tried per bucket.
        jobs: parallel compilations; None lets the compiler layer choose.
        families: only these; None is all.
        force: measure again what is measured.
        since: with `force`, what was measured from this moment on stands (ISO 8601, UTC); empty:
            nothing does.
        dashboard: a journal that Optuna's dashboard shows while the tune runs; not with a server.
        workers: how many tunes of like devices share this work, this one included.
    """

    problems: tuple[Problem, ...]
    device: str
    db: str
    mode: str = "eager"
    budget_s: float | None = None
    trials: int = DEFAULT_TRIALS
    jobs: int | None = None
    families: tuple[str, ...] | None = None
    force: bool = False
    since: str = ""
    dashboard: str | None = None
    workers: int = 1
    registry: Registry = REGISTRY
    settings: Settings = field(default_factory=Settings)


def parse_budget(text: str) -> float:
    """Seconds of `90s`, `10m` or `1h`; a bare number is seconds.

    Raises:
        UsageError: another form, or no time at all.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smh]?)\s*", text.lower())
    seconds = float(match.group(1)) * _UNITS[match.group(2) or "s"] if match else 0.0
    if not 0 < seconds < math.inf:
        do = "give the wall time of the whole tune"
        raise UsageError(explain_bad("budget", text, "90s, 10m, 1h", do))
    return seconds


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UsageError(explain_bad(name, value, "a whole number >= 1", "give one, or leave it"))
    return value


def _families(names: Sequence[str] | None, registry: Registry) -> tuple[str, ...] | None:
    if names is None:
        return None
    return tuple(dict.fromkeys(registry.family(name).name for name in names))


def _problems(
    profile: str | None,
    shapes: Sequence[str],
    kind: str,
    dtypes: Sequence[str] | None,
    causal: bool | None,
) -> tuple[tuple[Problem, ...], int]:
    wanted = None if dtypes is None else tuple(dict.fromkeys(parse_dtype(d) for d in dtypes))
    if wanted == ():
        raise UsageError(explain_bad("dtypes", dtypes, "f32, f16, bf16", "name one, or leave it"))
    mask = None if causal is None else "causal" if causal else "none"
    usual = ("f16",) if kind == "cuda" else ("f32",)
    found = [
        parse_shape(shape, dtype=dtype, mask=mask or "none", device=kind)
        for shape in shapes
        for dtype in wanted or usual
    ]
    trials = DEFAULT_TRIALS
    if profile is not None or not shapes:
        chosen = find_profile(DEFAULT_PROFILE if profile is None else profile, kind)
        trials = chosen.trials
        for problem in chosen.problems:
            masked = problem if mask is None else replace(problem, mask=mask)
            found += [replace(masked, dtype=dtype) for dtype in wanted or (problem.dtype,)]
    return tuple(dict.fromkeys(check(problem) for problem in found)), trials


def make_request(
    profile: str | None = None,
    *,
    shapes: Sequence[str] = (),
    device: str,
    dtypes: Sequence[str] | None = None,
    causal: bool | None = None,
    mode: str = "eager",
    budget: str | float | None = None,
    trials: int | None = None,
    jobs: int | None = None,
    families: Sequence[str] | None = None,
    db: str | None = None,
    force: bool = False,
    dashboard: str | None = None,
    registry: Registry = REGISTRY,
    settings: Settings | None = None,
) -> TuneRequest:
    """The request these arguments mean, duplicates removed.

    The shapes come first, then the profile's problems; with neither, the profile is `default`.
    `dtypes` and `causal` replace the profile's own. A shape is f16 on CUDA and f32 on CPU and
    dense, unless they say otherwise.

    Args:
        device: an existing device as torch writes it (`cuda:0`, `cpu`).
        budget: `90s`, `10m`, `1h`, or seconds.

    Raises:
        UsageError: whatever is wrong with an argument, before anything is opened or compiled.
    """
    if mode not in MODES:
        raise UsageError(explain_bad("mode", mode, ", ".join(MODES), "choose one of these"))
    if isinstance(shapes, str):
        raise UsageError(explain_bad("shapes", shapes, "a list of shapes", "wrap it in a list"))
    kind = device.partition(":")[0]
    problems, usual_trials = _problems(profile, shapes, kind, dtypes, causal)
    settings = settings or Settings()
    db = db or database(settings)
    if dashboard is not None and sqlite_path(db) is None:
        do = "leave --dashboard, and run `optuna-dashboard URL` with the database's URL"
        supported = "a file, where the database is one; a server has the studies itself"
        raise UsageError(explain_bad("dashboard", dashboard, supported, do))
    return TuneRequest(
        problems=problems,
        device=device,
        db=db,
        mode=mode,
        budget_s=None if budget is None else parse_budget(str(budget)),
        trials=_positive("trials", trials) or usual_trials,
        jobs=_positive("jobs", jobs),
        families=_families(families, registry),
        force=force,
        dashboard=dashboard,
        registry=registry,
        settings=settings,
    )
