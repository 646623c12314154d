"""The look-up ladder: measured -> predicted -> seed -> default -> sdpa. Pure: no torch, no file is
touched.

`resolve` walks the rungs for one question and says which kernel answers, which faster one is still
to be built, and why. `torch.sdpa` is displaced only by what measured faster than it, there or,
beyond doubt, in buckets around, or by a family's default where that family's own rule vouches for
it unmeasured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from autofa.device import DeviceKey, Limits
from autofa.dispatch.explanation import CandidateNote, Explanation
from autofa.dispatch.prediction import Guess, Prediction, Predictor
from autofa.kernels import Candidate, Registry
from autofa.kernels.family import Domain, Variant
from autofa.kernels.vendor import BASELINE
from autofa.problem import DTYPE_BYTES, Bucket, Problem, bucket_of
from autofa.store.doubt import doubt
from autofa.store.ranking import Ranked, is_valid, newest, rank
from autofa.store.rows import Row


@dataclass(frozen=True)
class Question:
    """One call, as far as the choice of a kernel goes.

    Attributes:
        mode: `eager` (ranked by call time) or `graph` (by device time).
        aligned: every base pointer and stride is a multiple of 16 bytes.
        deterministic: only bitwise-repeatable kernels may answer.
        precision: accuracy class, `f32` or `fast`.
        needs_lse: the log-sum-exp is wanted too, for a backward or by the caller.
        told: people read the notes, so that what only they want is worked out too.
    """

    problem: Problem
    device: DeviceKey
    limits: Limits
    mode: str = "eager"
    aligned: bool = True
    deterministic: bool = False
    precision: str = "f32"
    needs_lse: bool = False
    told: bool = False


@dataclass(frozen=True)
class Evidence:
    """What is known of one device.

    Attributes:
        measured, seeded: a bucket -> its rows; seeds are read only once something asks.
        buckets: those that have measured rows.
        lost: why nothing is measured, where that is a fault.
    """

    measured: Callable[[Bucket], Sequence[Row]]
    seeded: Callable[[Bucket], Sequence[Row]]
    buckets: tuple[Bucket, ...] = ()
    lost: str = ""

    @cached_property
    def predictor(self) -> Predictor:
        """What the measured rows say of buckets that have none."""
        return Predictor(self.measured, self.buckets)


@dataclass(frozen=True)
class Sources:
    """Where the ladder asks.

    Attributes:
        validity: a row -> `current`, `valid`, or why it is neither (`store.ranking.validity`).
        library_of: a variant -> its compiled library, None where there is none. Never compiles.
    """

    registry: Registry
    validity: Callable[[Row], str]
    library_of: Callable[[Variant], Path | None]


@dataclass(frozen=True)
class Decision:
    """What answers.

    Attributes:
        candidate: the kernel to call now; `library` is its file, None for vendors.
        wanted: a faster variant whose library is missing, None if nothing better is known.
    """

    explanation: Explanation
    candidate: Candidate
    library: Path | None
    wanted: Variant | None = None


# What a node of ours in the autograd graph costs more than torch's own. On a CPU, all of it waited
# for, 110 us of forward and backward at (1, 8, 128, 64) (torch 2.13 on a Xeon); on a GPU the host's
# time (4 to 10 us forward on an H200's host) hides behind kernels.
GRAPH_NODE_MS = {"cpu": 0.120, "cuda": 0.010}
# Unmeasured: problems of which a CPU call takes about ten times that.
_TINY_FLOPS = 1e7


def refusal(candidate: Candidate, question: Question) -> str | None:
    """Why `candidate` may not answer `question`; None if it may."""
    reason = candidate.refusal(question.problem, question.limits)
    if reason is not None:
        return reason
    if question.precision != "fast" and candidate.accuracy(question.problem.dtype) == "fast":
        return "accumulates in less than f32: set_precision('fast') admits it"
    if isinstance(candidate, Variant):
        domains: tuple[Domain, ...] = (candidate.family.domain,)
    else:
        if question.needs_lse and candidate.slug != BASELINE and not candidate.returns_lse:
            return "does not return the log-sum-exp"
        domains = tuple(d for d in candidate.domains if d.device == question.limits.kind)
    if question.deterministic and not all(d.deterministic for d in domains):
        return "is not deterministic"
    needed = max((d.alignment for d in domains), default=1)
    if not question.aligned and needed > DTYPE_BYTES[question.problem.dtype]:
        return f"needs pointers and strides aligned to {needed} bytes"
    return None


def resolve(question: Question, evidence: Evidence, sources: Sources) -> Decision:
    """Walks the ladder. Total: the last rung always answers."""
    bucket = bucket_of(question.problem)
    notes: dict[str, CandidateNote] = {}
    decision = _from_rows("measured", evidence.measured(bucket), question, sources, notes)
    if decision is not None:
        return decision
    reason = f"no valid measurement of bucket {bucket} on {question.device}"
    if evidence.lost:
        reason = f"{reason} ({evidence.lost})"
    if evidence.buckets:
        predicted = _predict(bucket, question, evidence, sources)
        decision = _from_prediction(predicted, question, sources, notes)
        if decision is not None:
            return decision
        reason = f"{reason}; nothing is predicted: {_why_unsure(predicted)}"
    decision = _from_rows("seed", evidence.seeded(bucket), question, sources, notes)
    if decision is not None:
        return decision
    default = _default(question, sources, notes)
    if default is not None:
        variant, library = default
        reason = f"{reason}: {variant.family.name} vouches for its default there"
        return _decision("default", reason, variant, library, None, notes)
    if question.problem.mask in ("none", "causal"):
        flag = "causal" if question.problem.causal else "no-causal"
        shape, dtype = question.problem.shape, question.problem.dtype
        reason += f"; `autofa tune --shape {shape} --dtype {dtype} --{flag}` makes one"
    return _decision("sdpa", reason, _baseline(sources), None, None, notes)


def _baseline(sources: Sources) -> Candidate:
    return sources.registry.candidate(BASELINE)


def _eligible(
    rows: Sequence[Row], question: Question, sources: Sources, notes: dict[str, CandidateNote]
) -> list[Row]:
    """The valid rows, failures included, of candidates that may answer; `notes` has the others."""
    kept = []
    refusals: dict[str, str | None] = {}
    # In order of shape: which row a note is of must not hang on the order in which rows came.
    for row in sorted(newest(rows), key=lambda row: row.problem):
        validity = sources.validity(row)
        candidate = sources.registry.find(row.slug)
        if candidate is None or not is_valid(validity):
            note = CandidateNote(row.slug, "stale", validity, row.time_ms, row.call_ms)
            notes.setdefault(row.slug, note)
            continue
        if row.slug not in refusals:
            refusals[row.slug] = refusal(candidate, question)
        reason_not = refusals[row.slug]
        if reason_not is not None:
            notes[row.slug] = CandidateNote(row.slug, "refused", reason_not)
            continue
        if row.status != "ok":
            notes[row.slug] = CandidateNote(row.slug, row.status, row.message)
        kept.append(row)
    return kept


def _from_rows(
    rung: str,
    rows: Sequence[Row],
    question: Question,
    sources: Sources,
    notes: dict[str, CandidateNote],
) -> Decision | None:
    """The answer of measurements; None where none of them may be used."""
    order = rank(_eligible(rows, question, sources, notes), question.mode, sources.registry)
    if not order:
        return None
    for ranked in order:
        notes[ranked.slug] = _note(ranked, question)
    where = "measured here" if rung == "measured" else "in the shipped measurements of this GPU"
    wanted: Variant | None = None
    # rank 1 is the winner, ties considered; behind it come the others by speedup.
    contenders = [ranked for ranked in order if ranked.beats_sdpa] if order[0].beats_sdpa else []
    if question.needs_lse:
        least = GRAPH_NODE_MS[question.limits.kind]
        contenders = [ranked for ranked in contenders if _saves(ranked) > least]
    for ranked in contenders:
        candidate = sources.registry.candidate(ranked.slug)
        library = sources.library_of(candidate) if isinstance(candidate, Variant) else None
        if isinstance(candidate, Variant) and library is None:
            notes[ranked.slug] = replace(
                notes[ranked.slug], status="not built", reason="its library is missing"
            )
            wanted = wanted or candidate
            continue
        reason = f"the best of {len(order)} {where}"
        if ranked.speedup is not None:
            reason = f"{ranked.speedup:.2f}x plain SDPA, {reason}"
        reason = _meanwhile(reason, wanted)
        return _decision(rung, reason, candidate, library, wanted, notes, order)
    reason = f"nothing of {len(order)} {where} is faster than plain SDPA by more than the noise"
    if wanted is not None:
        reason = _meanwhile("plain SDPA", wanted)
    return _decision(rung, reason, _baseline(sources), None, wanted, notes, order)


def _predict(
    bucket: Bucket, question: Question, evidence: Evidence, sources: Sources
) -> Prediction:
    return evidence.predictor.predict(
        bucket,
        question.mode,
        sources.registry,
        question.limits,
        lambda candidate: refusal(candidate, question) is None,
        lambda row: is_valid(sources.validity(row)),
    )


def _why_unsure(predicted: Prediction) -> str:
    if not predicted.guesses:
        return predicted.why_not
    best = predicted.guesses[0]
    return (
        f"{best.candidate.slug} would be {best.speedup:.2f}x plain SDPA, "
        f"give or take {_percent(best)}"
    )


def _percent(guess: Guess) -> str:
    return f"{100 * guess.doubt:.0f}%" if math.isfinite(guess.doubt) else "anything"


def _from_prediction(
    predicted: Prediction,
    question: Question,
    sources: Sources,
    notes: dict[str, CandidateNote],
) -> Decision | None:
    """The answer of what is predicted; None where it is not sure enough."""
    baseline, guesses = predicted.baseline, predicted.guesses
    if baseline is None or not guesses:
        return None
    sure = [guess for guess in guesses if guess.faster]
    if not sure and not guesses[0].slower:
        return None
    for guess in (*guesses, baseline):
        slug = guess.candidate.slug
        call_ms = guess.ms if question.mode == "eager" else None
        if slug in notes and notes[slug].status not in ("stale", "predicted"):
            continue  # it failed there
        reason = f"from {predicted.source}, give or take {_percent(guess)}"
        notes[slug] = CandidateNote(
            slug, "predicted", reason, guess.device_ms, call_ms, guess.speedup
        )
    wanted: Variant | None = None
    for guess in sure:
        candidate = guess.candidate
        library = sources.library_of(candidate) if isinstance(candidate, Variant) else None
        if notes[candidate.slug].status != "predicted":
            continue
        if isinstance(candidate, Variant) and library is None:
            note = replace(
                notes[candidate.slug], status="not built", reason="its library is missing"
            )
            notes[candidate.slug] = note
            wanted = wanted or candidate
            continue
        reason = (
            f"predicted {guess.speedup:.2f}x plain SDPA, give or take {_percent(guess)}, from "
            f"{predicted.source} around"
        )
        reason = _meanwhile(reason, wanted)
        return _decision("predicted", reason, candidate, library, wanted, notes)
    reason = f"predicted from {predicted.source} around: nothing is faster"
    if wanted is not None:
        reason = _meanwhile("plain SDPA", wanted)
    return _decision("predicted", reason, baseline.candidate, None, wanted, notes)


def _saves(ranked: Ranked) -> float:
    """Milliseconds of a call by plain SDPA that this one does not take."""
    calls = [row.call_ms for row in ranked.rows if row.call_ms is not None]
    return min(calls, default=0.0) * ((ranked.speedup or 1.0) - 1.0)


def _meanwhile(reason: str, wanted: Variant | None) -> str:
    return reason if wanted is None else f"{reason}; {wanted.slug} is faster, but not built yet"


def _note(ranked: Ranked, question: Question) -> CandidateNote:
    # The row of the very shape if there is one, else the newest of the bucket.
    row = max(ranked.rows, key=lambda r: (r.problem == question.problem, r.provenance.created_at))
    rough = doubt(row, question.mode) if question.told else ""
    return CandidateNote(ranked.slug, "ok", rough, row.time_ms, row.call_ms, ranked.speedup)


def _default(
    question: Question, sources: Sources, notes: dict[str, CandidateNote]
) -> tuple[Variant, Path] | None:
    """The first family's default that may answer unmeasured and whose library is there."""
    for family in sources.registry.families:
        variant = family.default_variant(question.problem, question.limits)
        if variant is None:
            reason = family.domain.refusal(question.problem, question.limits) or ""
            notes.setdefault(family.name, CandidateNote(family.name, "refused", reason))
            continue
        if variant.slug in notes and notes[variant.slug].status != "stale":
            continue  # it failed there
        reason_not = refusal(variant, question)
        if reason_not is None and not family.unmeasured(question.problem, question.limits):
            reason_not = "answers only where it was measured"
        if reason_not is None and question.needs_lse and question.problem.flops < _TINY_FLOPS:
            reason_not = "a problem so small does not pay for a node of ours in the graph"
        if reason_not is not None:
            notes.setdefault(variant.slug, CandidateNote(variant.slug, "refused", reason_not))
            continue
        library = sources.library_of(variant)
        if library is not None:
            notes.setdefault(variant.slug, CandidateNote(variant.slug, "ok"))
            return variant, library
        note = CandidateNote(variant.slug, "not built", "its library is missing")
        notes.setdefault(variant.slug, note)
    return None


def _decision(
    rung: str,
    reason: str,
    candidate: Candidate,
    library: Path | None,
    wanted: Variant | None,
    notes: dict[str, CandidateNote],
    order: Sequence[Ranked] = (),
) -> Decision:
    place = {ranked.slug: index for index, ranked in enumerate(order)}
    ordered = sorted(notes.values(), key=lambda n: (place.get(n.kernel, len(place)), n.kernel))
    own = notes.get(candidate.slug)
    explanation = Explanation(
        candidate.slug,
        rung,
        reason,
        own.time_ms if own else None,
        own.call_ms if own else None,
        tuple(ordered),
    )
    return Decision(explanation, candidate, library, wanted)
