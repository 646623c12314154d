"""Whether a candidate computes attention: held against float64, as exact as plain SDPA is.

The error of a row is measured in units of the size its output naturally has (`Reference.scale`):
a bug in late rows of a causal or a long problem, where outputs are small, would hide behind the
rounding of the first rows if absolute errors were compared. It may be four times the same measure
of plain SDPA of the same dtype on the same rows, since both round alike and only the order of sums
and the place of roundings differ; but SDPA may happen to be exact (one key), hence a floor.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from autofa.bench.inputs import TORCH_DTYPES, Frame, Inputs, make_inputs
from autofa.bench.native import Kernel, OutsideError, plain_sdpa, threads
from autofa.bench.protocol import Case
from autofa.bench.reference import Reference, attention

TIMES_SDPA = 4.0
# Kernels of the class "fast" round scores or sums to 16 bits, and are used only where users ask for
# them. Measured on an H200: 4 to 50 times plain SDPA's error, the most with large scores.
TIMES_FAST = 32.0
# f16 and bf16: one unit in the last place, twice the rounding of an exact result. f32: 32 of them,
# for sums over blocks and a polynomial exp; tf32, which must not pass, is 100 times above.
FLOOR = {"f32": 32 * 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
# Rounding a score s in f32 changes exp(s) by the relative error |s| * 2^-24; some accumulate more.
PER_SCORE = 4 * 2.0**-23
# Log-sum-exp, absolute: 16-bit kernels may sum rounded weights.
LSE_FLOOR = {"f32": 1e-4, "f16": 2e-3, "bf16": 1e-2}
_SHOWN_VALUES = 3
# References and inputs are kept while they fit in so many bytes.
_KEEP_BYTES = {"cpu": 1 << 30, "cuda": 1 << 33}


@dataclass(frozen=True)
class CheckResult:
    """Attributes:
    ok: whether all cases passed.
    error: largest absolute error on the last case, the problem itself; inf where NaN came out;
        None where that case was not reached.
    reference_error: plain SDPA's on the same rows.
    message: what is wrong, one line.
    wrote_outside: memory that was not its own was written; the process should end.
    values: the first values of the output of the last case, the problem itself.
    """

    ok: bool
    error: float | None = None
    reference_error: float | None = None
    message: str = ""
    wrote_outside: bool = False
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Truth:
    """A reference, with plain SDPA's errors against it: absolute, and in units of the scale."""

    reference: Reference
    sdpa_error: float
    sdpa_scaled: float

    def allowed(self, dtype: str, *, fast: bool) -> float:
        floor = FLOOR[dtype] + PER_SCORE * self.reference.largest_score
        exact = max(TIMES_SDPA * self.sdpa_scaled, floor)
        return exact * TIMES_FAST if fast else exact


@contextmanager
def without_cudnn() -> Iterator[None]:
    """SDPA with its other backends, which are as exact: cuDNN plans each shape anew, which takes 50
    to 700 ms (H200), half of what a tune's checks took."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def _errors(out: torch.Tensor, reference: Reference) -> tuple[torch.Tensor, torch.Tensor]:
    """Absolute and scaled errors of the sampled rows, (B, H, R, Dv). NaN counts as infinite."""
    difference = (out[:, :, reference.rows].double() - reference.out).abs()
    difference = difference.nan_to_num(nan=math.inf, posinf=math.inf)
    # Where nothing is visible the scale is 0 and only 0 is right.
    scaled = difference / reference.scale.clamp(min=1e-30)[..., None]
    return difference, scaled


class Truths:
    """Inputs and references of cases, kept between candidates. Not thread-safe.

    Candidates run with as many CPU threads as torch had when this was made. All else runs with one:
    these are many small steps, and where others use the cores a second thread made each of them
    wait (measured: 5 to 20 times slower on two busy cores).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.threads = torch.get_num_threads()
        self._inputs: OrderedDict[Case, tuple[Inputs, tuple[int, ...]]] = OrderedDict()
        self._truths: dict[Case, Truth] = {}
        self._held = 0

    def inputs(self, case: Case) -> tuple[Inputs, tuple[int, ...]]:
        """The inputs, and their checksum as it was when they were made."""
        key = replace(case, name="", repeat=False)
        if key not in self._inputs:
            size = case.problem.bytes
            if self._held + size > _KEEP_BYTES[self.device.type]:
                self._inputs.clear()
                self._truths.clear()
                self._held = 0
            self._held += size
            inputs = make_inputs(case, self.device)
            self._inputs[key] = (inputs, inputs.checksum())
        return self._inputs[key]

    def truth(self, case: Case) -> Truth:
        """The reference; cases that differ in layout or guard share it."""
        key = replace(case, name="", layout="bhnd", guarded=False, repeat=False)
        if key not in self._truths:
            inputs, _ = self.inputs(case)
            reference = attention(inputs)
            with threads(self.threads), without_cudnn():
                out = plain_sdpa(inputs)()
            absolute, scaled = _errors(out, reference)
            # Plain SDPA gives NaN on some empty rows; it then sets no standard.
            usable = torch.where(scaled < 1.0, scaled, 0.0)
            self._truths[key] = Truth(reference, float(absolute.max()), float(usable.max()))
        return self._truths[key]


def _describe(case: Case) -> str:
    p = case.problem
    return f"{case.name} ({p.shape} {p.dtype} {p.mask})"


def _race(case: Case) -> str:
    return f"{_describe(case)}: two runs on the same input differ, though declared deterministic"


def _first(bad: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in bad.nonzero()[0])


def _compare(
    out: torch.Tensor, truth: Truth, case: Case, *, fast: bool
) -> tuple[float, str | None]:
    """The largest absolute error, and what is wrong with it, if anything is."""
    reference = truth.reference
    allowed = truth.allowed(case.problem.dtype, fast=fast)
    absolute, scaled = _errors(out, reference)
    error = float(absolute.max())
    if not bool(torch.isfinite(out).all()):
        place = _first(~torch.isfinite(out))
        got = float(out[place])
        return math.inf, f"{_describe(case)}: got {got} at (b, h, n, d) = {place}"
    if float(scaled.max()) <= allowed:
        return error, None
    batch, head, sampled, column = _first(scaled > allowed)
    row = int(reference.rows[sampled])
    got = float(out[batch, head, row, column])
    right = float(reference.out[batch, head, sampled, column])
    return error, (
        f"{_describe(case)}: got {got:.6g} instead of {right:.6g} at (b, h, n, d) = "
        f"{(batch, head, row, column)}; largest error {error:.3g}, "
        f"plain SDPA's {truth.sdpa_error:.3g}"
    )


def _compare_lse(lse: torch.Tensor, truth: Truth, case: Case) -> str | None:
    right = truth.reference.lse
    got = lse[:, :, truth.reference.rows].double()
    allowed = LSE_FLOOR[case.problem.dtype] + PER_SCORE * truth.reference.largest_score
    bad = ~((got == right) | ((got - right).abs() <= allowed))
    if not bool(bad.any()):
        return None
    place = _first(bad)
    return (
        f"{_describe(case)}: log-sum-exp {float(got[place]):.6g} instead of "
        f"{float(right[place]):.6g} at (b, h, row) = {place}"
    )


def _check_guarded(
    kernel: Kernel, case: Case, truths: Truths, started: Callable[[int], None]
) -> CheckResult:
    """One launch into watched memory."""
    if kernel.write is None:
        raise TypeError(f"{kernel.slug} cannot write into given memory")
    inputs, checksum = truths.inputs(case)
    truth = truths.truth(case)
    p = case.problem
    shape = (p.batch, p.heads_q, p.seqlen_q, p.head_dim_v)
    out = Frame(shape, case.layout, TORCH_DTYPES[p.dtype], truths.device)
    sums = Frame(shape[:3], "flat", torch.float32, truths.device)
    started(0)
    try:
        with threads(truths.threads):
            kernel.write(inputs, out.view, sums.view)
    except OutsideError as outside:
        return CheckResult(False, message=f"{_describe(case)}: {outside}", wrote_outside=True)
    for frame, what in ((out, "output"), (sums, "log-sum-exp")):
        damage = frame.damage()
        if damage is not None:
            message = f"{_describe(case)}: wrote outside the {what}: {damage}"
            return CheckResult(False, message=message, wrote_outside=True)
    if inputs.checksum() != checksum:
        message = f"{_describe(case)}: wrote to its inputs"
        return CheckResult(False, message=message, wrote_outside=True)
    untouched = out.untouched()
    if bool(untouched.any()):
        message = (
            f"{_describe(case)}: {int(untouched.sum())} elements of the output were not written, "
            f"the first at (b, h, n, d) = {_first(untouched)}"
        )
        return CheckResult(False, math.inf, truth.sdpa_error, message)
    error, wrong = _compare(out.view, truth, case, fast=kernel.fast)
    wrong = wrong or _compare_lse(sums.view, truth, case)
    if wrong is None and case.repeat and kernel.deterministic:
        first = out.view.clone()
        out.refill()
        with threads(truths.threads):
            kernel.write(inputs, out.view, sums.view)
        wrong = None if torch.equal(first, out.view) else _race(case)
    return CheckResult(wrong is None, error, truth.sdpa_error, wrong or "")


def _check_called(
    kernel: Kernel, case: Case, truths: Truths, started: Callable[[int], None]
) -> CheckResult:
    """A call as dispatch makes it."""
    inputs, _ = truths.inputs(case)
    truth = truths.truth(case)
    p = case.problem
    shape = (p.batch, p.heads_q, p.seqlen_q, p.head_dim_v)
    # Freed at once, so that an allocator that reuses memory hands the operator NaN.
    poison = torch.full(shape, math.nan, dtype=TORCH_DTYPES[p.dtype], device=truths.device)
    del poison
    started(0)
    call = kernel.bind(inputs)
    with threads(truths.threads):
        first = call()
        second = call() if case.repeat and kernel.deterministic else first
    error, wrong = _compare(first, truth, case, fast=kernel.fast)
    if wrong is None and not torch.equal(first, second):
        wrong = _race(case)
    values = tuple(first[0, 0, 0, :_SHOWN_VALUES].tolist())
    return CheckResult(wrong is None, error, truth.sdpa_error, wrong or "", values=values)


def check(
    kernel: Kernel,
    cases: Sequence[Case],
    truths: Truths,
    started: Callable[[int], None] = lambda index: None,
) -> CheckResult:
    """Checks a candidate on all cases, the problem itself last; stops at the first failure.

    `started` is told 0 before the candidate's code runs and -1 before anything else does.

    Raises:
        LaunchError, MemoryError, RuntimeError: whatever the candidate's call raises.
    """
    result = CheckResult(True)
    with threads(1):
        for case in cases:
            started(-1)
            run = _check_guarded if case.guarded else _check_called
            result = run(kernel, case, truths, started)
            if not result.ok:
                return replace(result, error=result.error if case == cases[-1] else None)
    started(-1)
    return result
