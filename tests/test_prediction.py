"""The rung `predicted`, on made-up devices whose law is known: what is found, and what refused."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from store_samples import H200, make_row

from autofa.device import DeviceKey, limits_of
from autofa.dispatch.ladder import Decision, Evidence, Question, Sources, resolve
from autofa.dispatch.likeness import distance, nearness
from autofa.dispatch.prediction import Guess, Predictor
from autofa.dispatch.time_model import Sample, device_ms, fit, terms
from autofa.kernels import REGISTRY
from autofa.kernels.family import Variant
from autofa.kernels.vendor import BASELINE
from autofa.problem import Bucket, Problem, bucket_of, parse_shape
from autofa.store.rows import Row

CPU = DeviceKey("cpu", "Test CPU", "x86-64-v4", 8)
LENGTHS = (128, 512, 2048, 8192)
# Per kernel: launch in ms, ms per 1e12 of work, ms per GB, and ms of the host.
LAWS: dict[str, tuple[float, float, float, float]] = {
    BASELINE: (0.008, 1.6, 0.25, 0.025),
    "torch.flash": (0.007, 2.4, 0.25, 0.02),
    "mma.split_q-d64-m128n64-w4-s2-f32-bf16-none": (0.004, 1.9, 0.25, 0.008),
    "mma.split_q-d64-m64n64-w4-s2-f32-bf16-none": (0.003, 2.2, 0.25, 0.008),
    "mma.share_kv-d64-m64n32-w4-s2-f32-bf16-none": (0.003, 3.2, 0.25, 0.008),
}


def call(shape: str, dtype: str = "bf16", mask: str = "none", device: str = "cuda") -> Problem:
    return parse_shape(shape, dtype=dtype, mask=mask, device=device)


def millis(slug: str, problem: Problem, device: DeviceKey = H200) -> tuple[float, float]:
    """Device and call time on the made-up device."""
    launch, compute, memory, host = LAWS[slug]
    one, work, size = terms(problem, limits_of(device))
    took = launch * one + compute * work + memory * size
    return took, max(took, host)


def tuned(problems: Iterable[Problem], noise: float = 0.0, seed: int = 0) -> list[Row]:
    draw = random.Random(seed)
    rows = []
    for problem in problems:
        base = millis(BASELINE, problem)
        for slug in LAWS:
            factor = math.exp(draw.gauss(0.0, noise)) if slug != BASELINE else 1.0
            took, called = (value * factor for value in millis(slug, problem))
            rows.append(
                make_row(
                    slug, took, problem=problem, call_ms=called,
                    baseline_time_ms=base[0], baseline_call_ms=base[1],
                    fingerprint="torch==2.13" if slug.startswith("torch") else "0" * 32,
                )
            )  # fmt: skip
    return rows


GRID = [call(f"{b},16,{n},64") for b in (1, 8) for n in LENGTHS]


def ask(
    rows: Sequence[Row],
    problem: Problem,
    *,
    validity: Callable[[Row], str] = lambda row: "valid",
    missing: Callable[[Variant], bool] = lambda variant: False,
    seeds: Sequence[Row] = (),
    device: DeviceKey = H200,
    **question: object,
) -> Decision:
    by: dict[Bucket, list[Row]] = {}
    for row in rows:
        by.setdefault(row.bucket, []).append(row)
    evidence = Evidence(
        lambda bucket: by.get(bucket, ()),
        lambda bucket: [row for row in seeds if row.bucket == bucket],
        tuple(by),
    )
    sources = Sources(REGISTRY, validity, lambda v: None if missing(v) else Path(v.slug))
    return resolve(
        Question(problem, device, limits_of(device), **question),  # type: ignore[arg-type]
        evidence,
        sources,
    )


def of_candidate(rows: Sequence[Row], problem: Problem, slug: str) -> Guess:
    """What is predicted of one candidate by device time."""
    by: dict[Bucket, list[Row]] = {}
    for row in rows:
        by.setdefault(row.bucket, []).append(row)
    predictor = Predictor(lambda bucket: by.get(bucket, ()), tuple(by))
    found = predictor.predict(
        bucket_of(problem), "graph", REGISTRY, limits_of(H200), lambda c: True, lambda row: True
    )
    return next(guess for guess in found.guesses if guess.candidate.slug == slug)


UNTUNED = [call(f"{b},16,{n},64") for b in (2, 4) for n in (256, 1024, 4096)]


def best(problem: Problem, mode: str) -> str:
    return min(LAWS, key=lambda slug: (millis(slug, problem)[mode == "eager"], slug != BASELINE))


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("problem", UNTUNED, ids=lambda p: p.shape)
def test_finds_what_is_fastest_by_the_law(problem: Problem, mode: str) -> None:
    found = ask(tuned(GRID, noise=0.005), problem, mode=mode).explanation
    index = mode == "eager"
    took, least = millis(found.kernel, problem)[index], millis(best(problem, mode), problem)[index]
    assert took <= 1.04 * least or found.kernel == BASELINE
    if millis(BASELINE, problem)[index] > 1.3 * least:
        assert found.kernel != BASELINE
        assert found.rung == "predicted"
        # What was gained nearby is not all gained here: the made-up launches weigh less or more.
        assert found.time_ms == pytest.approx(millis(found.kernel, problem)[0], rel=0.2)
        if mode == "eager":
            assert found.call_ms == pytest.approx(millis(found.kernel, problem)[1], rel=0.2)
        else:
            assert found.call_ms is None


def test_both_answers_occur_and_say_why() -> None:
    short = ask(tuned(GRID), call("4,16,256,64")).explanation
    assert short.kernel.startswith("mma.")
    assert "plain SDPA, give or take" in short.reason
    assert "measured buckets around" in short.reason
    long = ask(tuned(GRID), call("4,16,4096,64")).explanation
    assert (long.kernel, long.rung) == (BASELINE, "predicted")
    assert "nothing is faster" in long.reason
    notes = {note.kernel: note for note in long.candidates}
    assert notes[BASELINE].status == "predicted"
    slower = notes["mma.split_q-d64-m128n64-w4-s2-f32-bf16-none"]
    assert slower.speedup is not None
    assert slower.speedup < 1


def test_a_measurement_comes_first() -> None:
    problem = call("4,16,256,64")
    rows = [make_row(problem=problem), make_row("torch.flash", 0.5, problem=problem)]
    found = ask([*tuned(GRID), *rows], problem).explanation
    assert (found.kernel, found.rung) == ("torch.flash", "measured")


def test_a_seed_answers_only_where_nothing_is_predicted() -> None:
    problem = call("4,16,256,64")
    seeds = [make_row(problem=problem), make_row("torch.flash", 0.5, problem=problem)]
    assert ask(tuned(GRID), problem, seeds=seeds).explanation.rung == "predicted"
    assert ask(tuned(GRID[3:4]), problem, seeds=seeds).explanation.rung == "seed"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (call("4,16,256,64", "f32"), "near enough"),
        (call("4,16,256,512"), "near enough"),
        (call("4,16,256,64", mask="bool"), "near enough"),
        (call("4,16,256/1024,64", mask="causal"), "near enough"),
        (call("4,16,1/1024,64"), "near enough"),
        (call("4,16,8,64"), "near enough"),
        (call("1,1,128,64"), "octaves beyond"),
    ],
    ids=str,
)
def test_what_is_unlike_all_that_was_measured_is_refused(problem: Problem, reason: str) -> None:
    found = ask(tuned(GRID), problem).explanation
    assert found.kernel == BASELINE
    assert found.rung != "predicted"
    assert reason in found.reason


def test_of_few_buckets_more_is_doubted() -> None:
    problem = call("4,16,256,64")
    one = of_candidate(tuned(GRID[1:2]), problem, "torch.flash").doubt
    two = of_candidate(tuned(GRID[1:3]), problem, "torch.flash").doubt
    assert of_candidate(tuned(GRID), problem, "torch.flash").doubt < two < one


def test_contradictory_measurements_are_doubted() -> None:
    """Every time off by a factor of two, or by a tenth."""
    problem = call("2,16,1024,64")

    def doubts(noise: float) -> float:
        tunes = (tuned(GRID, noise, seed) for seed in range(20))
        return math.fsum(of_candidate(rows, problem, "torch.flash").doubt for rows in tunes)

    assert doubts(0.7) > 2.5 * doubts(0.1)


@pytest.mark.parametrize("problem", [call("4,16,512,64"), call("4,16,4096,64")], ids=str)
def test_rough_measurements_never_make_it_slower_than_sdpa(problem: Problem) -> None:
    for seed in range(20):
        found = ask(tuned(GRID, 0.15, seed), problem, mode="graph").explanation
        assert millis(found.kernel, problem)[0] <= 1.02 * millis(BASELINE, problem)[0], seed


def test_kernels_alike_stand_for_one_another() -> None:
    """Of each bucket another kernel of the family was measured; what is known of all is used."""
    slugs = [slug for slug in LAWS if slug.startswith("mma.split_q")]
    rows = []
    for at, problem in enumerate(GRID):
        kept = (BASELINE, slugs[at % 2])
        rows += [row for row in tuned([problem]) if row.slug in kept]
    found = ask(rows, call("4,16,256,64")).explanation
    assert found.rung == "predicted"
    assert found.kernel in slugs


def test_a_default_stands_for_a_default() -> None:
    """Other head dims have tiles of their own."""
    family, limits = REGISTRY.family("mma.split_q"), limits_of(H200)
    rows = []
    for problem in (call(f"{b},16,{n},64") for b in (1, 4) for n in (512, 2048)):
        default = family.default_variant(problem, limits)
        assert default is not None
        rows += [
            make_row(BASELINE, 1.0, problem=problem),
            make_row(default.slug, 0.5, problem=problem),
        ]
    problem = call("2,16,1024,96")
    wanted = family.default_variant(problem, limits)
    assert wanted is not None
    assert ask(rows, problem, mode="graph").explanation.kernel == wanted.slug


def test_what_is_within_the_doubt_does_not_displace_sdpa() -> None:
    """A kernel as fast as SDPA but for 3 % of noise."""
    for seed in range(20):
        draw = random.Random(seed)
        rows = []
        for problem in GRID:
            for slug in (BASELINE, "torch.flash"):
                ms = millis(BASELINE, problem)[0]
                shaken = ms * math.exp(draw.gauss(0, 0.03)) if slug != BASELINE else ms
                rows.append(make_row(slug, shaken, problem=problem, baseline_time_ms=ms,
                                     baseline_call_ms=ms))  # fmt: skip
        found = ask(rows, call("2,16,1024,64")).explanation
        assert found.kernel == BASELINE, (seed, found.reason)


def test_rows_that_no_longer_hold_are_not_learnt_from() -> None:
    problem = call("4,16,256,64")

    def stale(row: Row) -> str:
        return "valid" if row.slug.startswith("torch") else "its source has changed"

    assert not ask(tuned(GRID), problem, validity=stale).explanation.kernel.startswith("mma")
    nothing = ask(tuned(GRID), problem, validity=lambda row: "another version").explanation
    assert nothing.rung == "sdpa"


def test_a_kernel_that_may_not_answer_is_not_predicted() -> None:
    found = ask(tuned(GRID), call("4,16,256,64"), aligned=False).explanation
    assert not found.kernel.startswith("mma")


def test_a_missing_library_is_wanted_and_the_next_best_answers() -> None:
    problem = call("4,16,256,64")
    first = ask(tuned(GRID), problem).explanation.kernel
    found = ask(tuned(GRID), problem, missing=lambda v: v.slug == first)
    assert found.wanted is not None
    assert found.wanted.slug == first
    assert found.candidate.slug not in (first, BASELINE)
    assert f"{first} is faster, but not built yet" in found.explanation.reason
    notes = {note.kernel: note.status for note in found.explanation.candidates}
    assert notes[first] == "not built"


def test_other_half_precision_dtype_and_head_dims_inform() -> None:
    rows = tuned(GRID)
    other = ask(rows, call("4,16,256,64", "f16")).explanation
    assert (other.rung, other.kernel.endswith("f16-none")) == ("predicted", True)
    grouped = ask(rows, call("4,16/4,256,64")).explanation
    assert (grouped.rung, grouped.kernel == BASELINE) == ("predicted", False)
    wide = ask(rows, call("4,16,4096,80")).explanation
    assert (wide.kernel, wide.rung) == (BASELINE, "predicted")


def test_neither_order_nor_repetition_changes_the_answer() -> None:
    rows = tuned(GRID, 0.01)
    answers = set()
    for seed in range(5):
        random.Random(seed).shuffle(rows)
        answers |= {ask(rows, problem).explanation for problem in UNTUNED[:2]}
    assert len(answers) == 2


def test_host_time_is_not_a_devices() -> None:
    """On a CPU a call is its work: no floor under short calls is made of long ones."""
    law = {BASELINE: 1.0, "torch.unfused": 0.5}
    problems = [call(f"{b},8,{n},64", "f32", device="cpu") for b in (1, 4) for n in (64, 256, 1024)]
    rows = []
    for problem in problems:
        for slug, factor in law.items():
            base = problem.flops * 1e-9
            rows.append(make_row(slug, factor * base, problem=problem, device=CPU,
                                 baseline_time_ms=base, baseline_call_ms=base))  # fmt: skip
    for shape in ("2,8,128,64", "1,4,64,64"):
        asked = call(shape, "f32", device="cpu")
        found = ask(rows, asked, device=CPU).explanation
        assert (found.kernel, found.rung) == ("torch.unfused", "predicted")
        assert found.call_ms == pytest.approx(asked.flops * 5e-10, rel=0.25)


def sample(problem: Problem, ms: float) -> Sample:
    return Sample(make_row(BASELINE), terms(problem, limits_of(H200)), ms)


def test_fit_finds_a_law_and_keeps_its_terms_above_zero() -> None:
    law = (0.01, 2.0, 0.5)
    samples = []
    for problem in GRID:
        found = terms(problem, limits_of(H200))
        samples.append(sample(problem, math.fsum(map(math.prod, zip(law, found, strict=True)))))
    assert fit(samples, [1.0] * len(samples)) == pytest.approx(law, rel=1e-6)
    falling = [sample(problem, 1.0 / (at + 1)) for at, problem in enumerate(GRID)]
    assert min(fit(falling, [1.0] * len(falling))) >= 0
    same = [sample(GRID[0], 1.0) for _ in range(4)]  # nothing tells the terms apart
    assert max(fit(same, [1.0] * 4)) > 0


def test_what_a_law_misses_nearby_corrects_it() -> None:
    asked = call("16,16,8192,64")
    samples, weights = [], []
    for problem in GRID:
        jump = 1.5 if problem.batch == 8 else 1.0  # another backend, say
        samples.append(sample(problem, jump * millis(BASELINE, problem)[0]))
        weights.append(nearness(distance(bucket_of(problem), bucket_of(asked))))
    took = device_ms(samples, weights, terms(asked, limits_of(H200)))
    assert took == pytest.approx(1.5 * millis(BASELINE, asked)[0], rel=0.05)


def test_what_lies_further_off_is_doubted_more() -> None:
    near = of_candidate(tuned(GRID), call("8,16,512,64", "f16"), "torch.flash").doubt
    far = of_candidate(tuned(GRID), call("4,16,512,64", "f16"), "torch.flash").doubt
    assert near < far < of_candidate(tuned(GRID), call("4,16,512,160"), "torch.flash").doubt


@pytest.mark.parametrize(
    ("speedup", "doubt", "faster", "slower"),
    [(1.5, 0.1, True, False), (1.5, 0.35, True, False), (1.5, 0.4, False, False),
     (1.02, 0.0, False, True), (0.9, 0.2, False, True), (0.9, 0.6, False, False),
     (2.5, 0.6, False, False), (2.0, math.inf, False, False)],
)  # fmt: skip
def test_a_guess_is_sure_or_not(speedup: float, doubt: float, faster: bool, slower: bool) -> None:
    guess = Guess(REGISTRY.candidate("torch.flash"), 1.0, 1.0, speedup, doubt)
    assert (guess.faster, guess.slower) == (faster, slower)


def test_work_counts_whole_tiles_of_the_busiest_unit() -> None:
    def work(shape: str, mask: str = "none") -> float:
        return terms(call(shape, mask=mask), limits_of(H200))[1]

    assert work("1,132,128,64") == work("1,1,128,64") == work("1,132,100,64")  # one wave
    assert work("1,133,128,64") == 2 * work("1,132,128,64")  # its tail
    assert work("1,132,128/65,64") == work("1,132,128,64")  # padded keys
    assert 0.5 < work("1,132,4096,64", "causal") / work("1,132,4096,64") < 0.52


def test_distance_is_symmetric_and_knows_its_limits() -> None:
    one, other = bucket_of(call("1,16,256,64")), bucket_of(call("4,16,512,96", "f16", "causal"))
    assert distance(one, one) == 0
    assert distance(one, other) == pytest.approx(distance(other, one))
    kinds = ({"mask": "causal"}, {"dtype": "f16"}, {"head_dim": 128, "head_dim_v": 128})
    assert all(0 < distance(one, replace(one, **kind)) < 4 for kind in kinds)
    assert distance(one, replace(other, dtype="f32")) == math.inf
    cpu = replace(one, device="cpu")
    assert distance(cpu, replace(cpu, dtype="f16")) == math.inf


def test_a_first_prediction_is_quick() -> None:
    """Of a whole profile: 70 buckets with 40 kernels each."""
    variants = REGISTRY.family("mma.split_q").legal(GRID[0], limits_of(H200))
    slugs = [*LAWS, *(v.slug for v in variants)][:40]
    problems = [call(f"{b},{h},{n},64") for b in (1, 2, 4, 8, 16) for h in (8, 16)
                for n in (64, 128, 256, 512, 1024, 2048, 4096)]  # fmt: skip
    rows = [
        make_row(slug, 0.5 + index / 100, problem=problem)
        for problem in problems
        for index, slug in enumerate(slugs)
    ]
    for row in rows:
        assert row.bucket  # as after the database was read
    start = time.process_time()
    ask(rows, call("2,32,8192,64"))
    assert time.process_time() - start < 0.1
