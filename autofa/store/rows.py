"""`Row`, one measurement with all that is known about it; pure values, no database."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter

from autofa.device import DeviceKey
from autofa.errors import UsageError
from autofa.problem import Bucket, Problem, bucket_of, check

STATUSES = (
    "ok",
    "pruned",
    "compile_error",
    "launch_error",
    "wrong_result",
    "timeout",
    "crashed",
    "out_of_memory",
)
# What proves that a kernel must not be used; `pruned` says only that it was not tried.
FAILURES = STATUSES[2:]
MODES = ("eager", "graph")

# No attention call takes 11 days, and none a picosecond: what is beyond is a damaged number, whose
# ratios to others need not be finite.
MAX_NUMBER = 1e9
MIN_MS = 1e-9
MAX_NAME = 255
MAX_MESSAGE = 4000
MAX_DETAILS = 16000
_MAX_INT = 2**31 - 1
_CREATED_AT = re.compile(r"[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-9]{2}:[0-9]{2}:[0-9]{2}"
                         r"(\.[0-9]{1,9})?(Z|\+00:00)")  # fmt: skip


@dataclass(frozen=True)
class Provenance:
    """What a measurement was made with.

    Attributes:
        autofa, torch, cuda, driver, compiler: versions; empty where there is none.
        host: the machine's name.
        created_at: when, UTC, ISO 8601 with `+00:00` or `Z`.
        details: a JSON object as text: clocks, power limit, temperature, load average.
    """

    autofa: str
    torch: str
    cuda: str
    driver: str
    compiler: str
    host: str
    created_at: str
    details: str = "{}"


def clean_message(text: str) -> str:
    """`text` as every database and JSON can hold it: no NUL, no lone surrogate, bounded length."""
    text = text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


@dataclass(frozen=True)
class Row:
    """One candidate measured, or failed, on one device at one shape.

    Attributes:
        slug, family: the candidate's name and its family's.
        fingerprint: own kernels: of the source; vendor kernels: `<library>==<major.minor>`.
        status: one of `STATUSES`.
        run: shared by rows whose samples were interleaved with one another; only times of one run
            may be compared as they are.
        time_ms, call_ms: median device time and median wall time per call; None unless measured.
        time_spread, call_spread: relative half-width of the 95% interval of that median.
        time_p10 ... call_p90: quantiles in ms.
        samples: how many samples the medians are of.
        baseline_time_ms, baseline_call_ms: plain SDPA's medians of the same run.
        error: largest absolute difference from the float64 reference; None where it is not a
            finite number, which neither JSON nor SQL can hold.
        message: why it failed, for people.
        seconds: what the measurement cost.
    """

    device: DeviceKey
    problem: Problem
    slug: str
    family: str
    fingerprint: str
    status: str
    run: str
    time_ms: float | None
    call_ms: float | None
    time_spread: float | None
    call_spread: float | None
    time_p10: float | None
    time_p90: float | None
    call_p10: float | None
    call_p90: float | None
    samples: int
    baseline_time_ms: float | None
    baseline_call_ms: float | None
    error: float | None
    message: str
    seconds: float
    provenance: Provenance

    def __post_init__(self) -> None:
        if self.message:
            object.__setattr__(self, "message", clean_message(self.message))
        if self.error is not None and not math.isfinite(self.error):
            object.__setattr__(self, "error", None)

    @classmethod
    def unchecked(cls, values: Iterable[object]) -> Row:
        """A row of values in field order, as they are: for decoders, which check by `row_defect`.

        A process reads its device's whole table before its first call; the frozen constructor
        costs 4 us a row, this 1 us.
        """
        row = object.__new__(cls)
        row.__dict__.update(zip(ROW_FIELDS, values, strict=True))
        return row

    @cached_property
    def bucket(self) -> Bucket:
        return bucket_of(self.problem)

    def milliseconds(self, mode: str) -> float | None:
        """The time that `mode` ranks by: `call_ms` in eager, `time_ms` in graph."""
        return self.call_ms if mode == "eager" else self.time_ms

    def spread(self, mode: str) -> float | None:
        return self.call_spread if mode == "eager" else self.time_spread

    def speedup(self, mode: str) -> float | None:
        """Plain SDPA's time over this one's, same measure and run; None where either is missing."""
        own = self.milliseconds(mode)
        base = self.baseline_call_ms if mode == "eager" else self.baseline_time_ms
        if own is None or base is None or not own > 0 or not base > 0:
            return None
        return base / own

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of everything above in canonical JSON: the same on every machine."""
        text = json.dumps(document(self), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode("ascii")).hexdigest()


ROW_FIELDS = tuple(f.name for f in fields(Row))
NUMBERS = (
    "time_ms", "call_ms", "time_spread", "call_spread", "time_p10", "time_p90", "call_p10",
    "call_p90", "baseline_time_ms", "baseline_call_ms", "error", "seconds",
)  # fmt: skip
_NAMES = ("slug", "family", "fingerprint", "run")
_NAMED = re.compile("\0".join([f"[ -~]{{1,{MAX_NAME}}}"] * len(_NAMES)))
_numbers = attrgetter(*NUMBERS)
_names = attrgetter(*_NAMES)
PARTS: dict[str, tuple[str, ...]] = {
    "device": tuple(f.name for f in fields(DeviceKey)),
    "problem": tuple(f.name for f in fields(Problem)),
    "provenance": tuple(f.name for f in fields(Provenance)),
}
_SIZES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
_PROBLEM_TYPES: dict[str, type] = {
    "dtype": str,
    **dict.fromkeys(_SIZES, int),
    "mask": str,
    "device": str,
    "dropout": bool,
    "needs_grad": bool,
}


def age(row: Row) -> tuple[bool, str, bool, str]:
    """Sort key: the later it was measured, the larger; `pruned` before all else."""
    # A failure of the same instant counts as the newer one: never use what may be broken.
    return row.status != "pruned", row.provenance.created_at, row.status != "ok", row.run


def document(row: Row) -> dict[str, object]:
    """The row as nested plain values, ready for `json.dumps`."""
    found: dict[str, object] = {}
    for name in ROW_FIELDS:
        value = getattr(row, name)
        if name in PARTS:
            value = {part: getattr(value, part) for part in PARTS[name]}
        elif name in NUMBERS and value is not None:
            value = float(value)
        found[name] = value
    return found


def number_defect(name: str, value: object) -> str | None:
    """Why `value` cannot be a measured number; None if it can."""
    if value is None and name != "seconds":
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return f"{name} is {value!r:.40}, not a number"
    least = 0.0 if name.endswith(("spread", "error", "seconds")) else MIN_MS
    if not least <= value <= MAX_NUMBER:
        return f"{name} is {value!r:.40}, not in {least:g} ... {MAX_NUMBER:g}"
    return None


def _text_defect(name: str, value: object, limit: int = MAX_NAME) -> str | None:
    if not isinstance(value, str):
        return f"{name} is {value!r:.40}, not text"
    if len(value) > limit:
        return f"{name} has {len(value)} characters, more than {limit}"
    if "\0" in value or (not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value)):
        return f"{name} holds characters that are no text"
    return None


def _count_defect(name: str, value: object, least: int) -> str | None:
    if type(value) is not int or not least <= value <= _MAX_INT:
        return f"{name} is {value!r:.40}, not a whole number in {least} ... {_MAX_INT}"
    return None


def device_defect(device: DeviceKey) -> str | None:
    """Why this cannot be a device's key; None if it can."""
    if device.kind not in ("cuda", "cpu"):
        return f"device kind is {device.kind!r:.40}, not cuda or cpu"
    return (
        _text_defect("device name", device.name)
        or _text_defect("device arch", device.arch)
        or _count_defect("device units", device.units, 1)
        or _count_defect("device memory_gib", device.memory_gib, 0)
    )


def problem_defect(problem: Problem) -> str | None:
    """Why no call can have this problem; None if one can."""
    for name, kind in _PROBLEM_TYPES.items():
        value = getattr(problem, name)
        if type(value) is not kind:
            return f"problem {name} is {value!r:.40}"
    if problem.dtype not in ("f32", "f16", "bf16"):
        return f"dtype is {problem.dtype!r:.40}"
    try:
        check(problem)
    except UsageError as error:
        return str(error)[:200]
    return None


def provenance_defect(provenance: Provenance) -> str | None:
    """Why this cannot be a measurement's provenance; None if it can."""
    for name in PARTS["provenance"]:
        limit = MAX_DETAILS if name == "details" else MAX_NAME
        defect = _text_defect(name, getattr(provenance, name), limit)
        if defect is not None:
            return defect
    if not _CREATED_AT.fullmatch(provenance.created_at):
        return f"created_at is {provenance.created_at!r:.40}, not a UTC time in ISO 8601"
    try:
        if isinstance(json.loads(provenance.details), dict):
            return None
    except (ValueError, RecursionError):
        pass
    return "details is not a JSON object"


def row_defect(row: Row) -> str | None:
    """Why this row cannot be a measurement; None if it can. Total, whatever the fields hold."""
    return (
        device_defect(row.device)
        or problem_defect(row.problem)
        or provenance_defect(row.provenance)
        or own_defect(row)
    )


def own_defect(row: Row) -> str | None:
    """`row_defect` less its device, problem and provenance, which many rows share."""
    if row.status not in STATUSES:
        return f"status is {row.status!r:.40}, not one of {', '.join(STATUSES)}"
    if row.problem.device != row.device.kind:
        return f"problem for {row.problem.device} measured on {row.device.kind}"
    if row.status == "ok" and (row.time_ms is None or row.call_ms is None):
        return "status is ok, but there is no time"
    try:
        named = _NAMED.fullmatch("\0".join(_names(row)))
    except TypeError:
        named = None
    if named is None:
        return f"{', '.join(_NAMES)} are not all 1 ... {MAX_NAME} printable ASCII characters"
    numbers = _numbers(row)
    try:
        sound = min(numbers) >= MIN_MS and sum(numbers) <= MAX_NUMBER
    except TypeError:
        sound = False
    if not sound:
        for name, value in zip(NUMBERS, numbers, strict=True):
            defect = number_defect(name, value)
            if defect is not None:
                return defect
    defect = _text_defect("message", row.message, MAX_MESSAGE) if row.message != "" else None
    return defect or _count_defect("samples", row.samples, 0)
