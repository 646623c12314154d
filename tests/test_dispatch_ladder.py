"""The ladder, on made-up rows: which rung answers, with what, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from store_samples import CPU, PROBLEM, at, failed, make_row

from autofa.device import Limits
from autofa.dispatch.ladder import Decision, Evidence, Question, Sources, resolve
from autofa.kernels import Registry
from autofa.kernels.family import Domain, HeadDims, KernelFamily, Param, Variant
from autofa.kernels.vendor import BASELINE, VENDORS
from autofa.problem import Problem, bucket_of
from autofa.store.rows import Row

LIMITS = Limits("cpu", "x86-64-v4", 4, units=2)
CALL = replace(PROBLEM, dtype="f32", device="cpu")
NOTHING: Sequence[Row] = ()


def family(name: str = "test.own", **fields: object) -> KernelFamily:
    values: dict[str, object] = {
        "name": name,
        "title": name,
        "version": 1,
        "folder": "none",
        "entry": "none.h",
        "domain": Domain("cpu", ("f32",), masks=("none", "causal")),
        "params": (Param("step", (1, 2, 3), "x{}"),),
        "target": lambda p, limits: limits.arch,
        "default": lambda problem, limits: {"step": 1},
        "specialised": (),
    }
    return KernelFamily(**{**values, **fields})  # type: ignore[arg-type]


def row(slug: str, ms: float, **fields: object) -> Row:
    return make_row(slug, ms, device=CPU, problem=CALL, **fields)


def ask(
    rows: Sequence[Row] = NOTHING,
    seeds: Sequence[Row] = NOTHING,
    *,
    families: tuple[KernelFamily, ...] = (),
    missing: Callable[[Variant], bool] = lambda variant: False,
    validity: Callable[[Row], str] = lambda row: "valid",
    problem: Problem = CALL,
    lost: str = "",
    **question: object,
) -> Decision:
    def of(some: Sequence[Row]) -> Callable[[object], list[Row]]:
        return lambda bucket: [r for r in some if bucket_of(r.problem) == bucket]

    return resolve(
        Question(problem, CPU, LIMITS, **question),  # type: ignore[arg-type]
        Evidence(of(rows), of(seeds), lost=lost),
        Sources(
            Registry(families or (family(),), VENDORS),
            validity,
            lambda variant: None if missing(variant) else Path(variant.slug),
        ),
    )


def test_a_disturbed_measurement_is_said_to_be_one() -> None:
    rough = row("test.own-x2", 0.5, provenance=replace(at(1), details='{"waited": 0.5}'))
    rows = [rough, row(BASELINE, 1.0)]
    notes = {n.kernel: n for n in ask(rows, told=True).explanation.candidates}
    assert notes["test.own-x2"].reason == "disturbed: its threads had to wait for cores"
    assert (notes[BASELINE].status, notes[BASELINE].reason) == ("ok", "")


def test_measured_winner_answers() -> None:
    found = ask([row("test.own-x2", 0.5), row("test.own-x1", 0.8), row(BASELINE, 1.0)])
    assert found.explanation.kernel == "test.own-x2"
    assert found.explanation.rung == "measured"
    assert "2.00x" in found.explanation.reason
    assert found.explanation.call_ms == 0.5
    assert found.library == Path("test.own-x2")
    assert [note.kernel for note in found.explanation.candidates] == [
        "test.own-x2",
        "test.own-x1",
        BASELINE,
    ]


def test_sdpa_is_displaced_only_beyond_the_noise() -> None:
    tied = ask([row("test.own-x2", 0.99), row(BASELINE, 1.0)])
    assert (tied.explanation.kernel, tied.explanation.rung) == (BASELINE, "measured")
    assert tied.library is None


def test_measured_before_seed_before_default() -> None:
    own = family(unmeasured=lambda problem, limits: True)
    seeds = [row("test.own-x3", 0.5), row(BASELINE, 1.0)]
    measured = [row("test.own-x2", 0.9), row(BASELINE, 1.0)]
    assert ask(measured, seeds, families=(own,)).explanation.kernel == "test.own-x2"
    seeded = ask((), seeds, families=(own,)).explanation
    assert (seeded.kernel, seeded.rung) == ("test.own-x3", "seed")
    default = ask(families=(own,)).explanation
    assert (default.kernel, default.rung) == ("test.own-x1", "default")
    assert default.time_ms is None


def test_seeds_are_not_read_where_something_was_measured() -> None:
    def fail(bucket: object) -> list[Row]:
        raise AssertionError("the seed was read")

    rows = [row("test.own-x2", 0.5), row(BASELINE, 1.0)]
    sources = Sources(Registry((family(),), VENDORS), lambda r: "valid", lambda v: Path("x"))
    found = resolve(Question(CALL, CPU, LIMITS), Evidence(lambda b: rows, fail), sources)
    assert found.explanation.rung == "measured"


def test_a_default_answers_only_where_its_family_vouches_and_it_is_built() -> None:
    own = family(unmeasured=lambda problem, limits: problem.head_dim == 64)
    assert ask(families=(own,)).explanation.rung == "default"
    wide = replace(CALL, head_dim=128, head_dim_v=128)
    assert ask(families=(own,), problem=wide).explanation.rung == "sdpa"
    unbuilt = ask(families=(own,), missing=lambda v: True)
    assert unbuilt.explanation.rung == "sdpa"
    assert unbuilt.wanted is None  # nothing is built for a guess
    assert unbuilt.explanation.candidates[0].status == "not built"


def test_nothing_known_is_sdpa_and_says_how_to_measure() -> None:
    found = ask(lost="the database is damaged").explanation
    assert (found.kernel, found.rung) == (BASELINE, "sdpa")
    assert "autofa tune --shape 1,8,1024,64 --dtype f32 --no-causal" in found.reason
    assert "the database is damaged" in found.reason


def test_missing_winner_is_wanted_and_the_next_best_answers() -> None:
    rows = [row("test.own-x2", 0.5), row("test.own-x1", 0.7), row(BASELINE, 1.0)]
    found = ask(rows, missing=lambda v: v.slug == "test.own-x2")
    assert found.explanation.kernel == "test.own-x1"
    assert found.wanted is not None
    assert found.wanted.slug == "test.own-x2"
    assert "test.own-x2 is faster, but not built yet" in found.explanation.reason


def test_a_stand_in_is_never_slower_than_sdpa() -> None:
    rows = [row("test.own-x2", 0.5), row("test.own-x1", 1.3), row(BASELINE, 1.0)]
    own = family(unmeasured=lambda problem, limits: True)  # its default, x1, was measured slower
    found = ask(rows, families=(own,), missing=lambda v: v.slug == "test.own-x2")
    assert found.explanation.kernel == BASELINE
    assert found.wanted is not None


def test_stale_rows_are_a_miss_and_said() -> None:
    rows = [row("test.own-x2", 0.5), row(BASELINE, 1.0)]
    found = ask(rows, validity=lambda r: "valid" if r.slug == BASELINE else "source changed")
    assert found.explanation.kernel == BASELINE
    note = next(n for n in found.explanation.candidates if n.kernel == "test.own-x2")
    assert (note.status, note.reason) == ("stale", "source changed")


def test_all_stale_falls_to_the_next_rung() -> None:
    own = family(unmeasured=lambda problem, limits: True)
    rows = [row("test.own-x2", 0.5), row(BASELINE, 1.0)]
    assert ask(rows, families=(own,), validity=lambda r: "old").explanation.rung == "default"


def test_own_rows_stay_valid_when_the_baseline_is_of_another_torch() -> None:
    rows = [row("test.own-x2", 0.5), row("test.own-x1", 1.2), row(BASELINE, 1.0)]
    found = ask(rows, validity=lambda r: "old torch" if r.slug == BASELINE else "valid")
    assert found.explanation.kernel == "test.own-x2"
    slow = ask(rows[1:], validity=lambda r: "old torch" if r.slug == BASELINE else "valid")
    assert slow.explanation.kernel == BASELINE


def test_slugs_nobody_declares_are_not_dispatched() -> None:
    rows = [row("gone.family-x2", 0.1), row("test.own-x9", 0.1), row(BASELINE, 1.0)]
    assert ask(rows).explanation.kernel == BASELINE


@pytest.mark.parametrize("status", ["crashed", "wrong_result", "timeout"])
def test_what_failed_later_is_not_dispatched(status: str) -> None:
    own = family(unmeasured=lambda problem, limits: True)
    late = failed("test.own-x1", status, device=CPU, problem=CALL, provenance=at(5))
    rows = [row("test.own-x1", 0.5), row(BASELINE, 1.0), late]
    found = ask(rows, families=(own,))
    assert found.explanation.kernel == BASELINE
    note = next(n for n in found.explanation.candidates if n.kernel == "test.own-x1")
    assert note.status == status


def test_only_failures_bar_the_default_too() -> None:
    own = family(unmeasured=lambda problem, limits: True)
    found = ask([failed("test.own-x1", device=CPU, problem=CALL)], families=(own,))
    assert found.explanation.kernel == BASELINE


def test_the_call_itself_can_be_outside_the_domain() -> None:
    # The bucket was measured at 64 x 64; this call of the same bucket has unequal lengths.
    own = family(domain=Domain("cpu", ("f32",), HeadDims(), unequal_lengths=False))
    rows = [row("test.own-x2", 0.5), row(BASELINE, 1.0)]
    odd = replace(CALL, seqlen_q=1000)
    assert ask(rows, families=(own,)).explanation.kernel == "test.own-x2"
    found = ask(rows, families=(own,), problem=odd).explanation
    assert found.kernel == BASELINE
    assert found.candidates[-1].status == "refused"


def test_modes_rank_by_their_own_measure() -> None:
    rows = [
        row("test.own-x1", 1.0, time_ms=0.4, call_ms=0.9),
        row("test.own-x2", 1.0, time_ms=0.6, call_ms=0.5),
        row(BASELINE, 1.0),
    ]
    assert ask(rows, mode="eager").explanation.kernel == "test.own-x2"
    assert ask(rows, mode="graph").explanation.kernel == "test.own-x1"


@pytest.mark.parametrize(
    ("domain", "question", "reason"),
    [
        ({"deterministic": False}, {"deterministic": True}, "not deterministic"),
        ({"alignment": 16}, {"aligned": False}, "aligned to 16 bytes"),
    ],
)
def test_eligibility(domain: dict, question: dict, reason: str) -> None:
    own = family(domain=Domain("cpu", ("f32",), **domain))
    rows = [row("test.own-x2", 0.5), row(BASELINE, 1.0)]
    assert ask(rows, families=(own,)).explanation.kernel == "test.own-x2"
    refused = ask(rows, families=(own,), **question).explanation
    assert refused.kernel == BASELINE
    assert reason in refused.candidates[-1].reason


def test_less_exact_variants_need_to_be_asked_for() -> None:
    own = family(params=(Param("accumulate", ("f32", "f16"), "{}"),))
    own = replace(own, default=lambda problem, limits: {"accumulate": "f32"})
    rows = [row("test.own-f16", 0.3), row("test.own-f32", 0.6), row(BASELINE, 1.0)]
    assert ask(rows, families=(own,)).explanation.kernel == "test.own-f32"
    assert ask(rows, families=(own,), precision="fast").explanation.kernel == "test.own-f16"


def test_explanation_is_strict_json() -> None:
    import json

    rows = [row("test.own-x2", 0.5), row(BASELINE, 1.0)]
    found = json.loads(ask(rows).explanation.to_json())
    assert set(found) == {"kernel", "rung", "reason", "time_ms", "call_ms", "candidates"}
    assert found["candidates"][0]["speedup"] == pytest.approx(2.0)
