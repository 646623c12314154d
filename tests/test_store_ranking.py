"""Ranking: ties, the baseline's privilege, failures, pooling; and whether a row still holds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import H200, PROBLEM, PROVENANCE, at, failed, make_row

from autofa.device import Limits
from autofa.kernels import REGISTRY, Registry
from autofa.kernels.family import Domain, KernelFamily, Param, Variant
from autofa.kernels.vendor import VENDORS
from autofa.store.ranking import CURRENT, VALID, Ranked, is_valid, rank, validity
from autofa.store.rows import Row

TOY = KernelFamily(
    name="test.toy",
    title="toy",
    version=1,
    folder="toy",
    entry="kernel.h",
    domain=Domain("cuda", ("f16",), max_arch=100),
    params=(Param("cost", tuple(range(40)), "c{}"),),
    target=lambda params, limits: limits.arch,
    default=lambda problem, limits: {"cost": 0},
    specialised=(),
)
TOYS = Registry((TOY,), VENDORS)


def toy(cost: int, ms: float | None, **fields: object) -> Row:
    return make_row(f"test.toy-c{cost}", ms, fingerprint="abc", **fields)


def order(rows: list[Row], mode: str = "eager") -> list[str]:
    return [place.slug for place in rank(rows, mode, TOYS)]


def first(rows: list[Row], mode: str = "eager") -> Ranked:
    return rank(rows, mode, TOYS)[0]


def test_the_fastest_wins_and_the_rest_follow_by_speedup() -> None:
    ranked = rank([make_row(), toy(3, 2.0), toy(1, 0.5), toy(2, 0.8)], "eager", TOYS)
    assert [(place.slug, place.rank) for place in ranked] == [
        ("test.toy-c1", 1),
        ("test.toy-c2", 2),
        ("torch.sdpa", 3),
        ("test.toy-c3", 4),
    ]
    assert [place.speedup for place in ranked] == pytest.approx([2.0, 1.25, 1.0, 0.5])
    assert [place.beats_sdpa for place in ranked] == [True, True, False, False]
    assert [place.tied for place in ranked] == [True, False, False, False]


def test_the_simplest_of_a_tie_wins() -> None:
    rows = [make_row(), toy(9, 0.500), toy(4, 0.505), toy(1, 0.6)]
    assert order(rows) == ["test.toy-c4", "test.toy-c9", "test.toy-c1", "torch.sdpa"]
    assert [place.tied for place in rank(rows, "eager", TOYS)] == [True, True, False, False]
    # The same times, known more exactly, are no tie.
    exact = [replace(row, call_spread=0.001) for row in rows]
    exact[1] = replace(exact[1], call_ms=0.49, time_ms=0.49)
    assert order(exact)[0] == "test.toy-c9"


def held(row: Row) -> Row:
    return replace(row, provenance=replace(row.provenance, details='{"held": true}'))


def test_what_held_an_upgrade_stays_until_something_is_clearly_faster() -> None:
    base = make_row(provenance=at(1))
    simpler = toy(4, 0.495, provenance=at(1))
    assert order([base, toy(9, 0.500, provenance=at(1)), simpler])[0] == "test.toy-c4"
    kept = held(toy(9, 0.500, provenance=at(1)))
    assert order([base, kept, simpler])[0] == "test.toy-c9"
    exact = [replace(row, call_spread=0.001) for row in (base, kept, simpler)]
    exact[2] = replace(exact[2], call_ms=0.478)
    assert order(exact)[0] == "test.toy-c9", "4.5% are less than two runs may differ by"
    assert order([base, kept, toy(4, 0.473, provenance=at(1))])[0] == "test.toy-c4"
    # Its next measurement is one like any other.
    assert order([base, kept, simpler, toy(9, 0.500, provenance=at(2))])[0] == "test.toy-c4"


def test_what_held_an_upgrade_is_compared_with_what_was_measured_since() -> None:
    kept = [make_row(provenance=at(2)), held(toy(9, 0.500, provenance=at(2)))]
    assert order([*kept, toy(4, 0.3, run="before", provenance=at(1))])[0] == "test.toy-c9"
    assert order([*kept, toy(4, 0.3, run="after", provenance=at(3))])[0] == "test.toy-c4"


@pytest.mark.parametrize("details", ['["held"]', "held", '{"held": 1}', '"held"' + "[" * 10**5])
def test_nothing_but_a_mark_holds(details: str) -> None:
    marked = toy(9, 0.500, provenance=replace(at(1), details=details))
    assert order([make_row(), marked, toy(4, 0.495)])[0] == "test.toy-c4"


def test_wide_intervals_do_not_hide_a_clear_loss() -> None:
    rows = [make_row(), toy(9, 0.500, call_spread=0.1), toy(4, 0.525, call_spread=0.1)]
    assert order(rows)[0] == "test.toy-c9"
    assert order([*rows[:2], toy(4, 0.505, call_spread=0.1)])[0] == "test.toy-c4"


def test_intervals_narrower_than_runs_repeat_do_not_separate() -> None:
    rows = [make_row(), toy(9, 0.500, call_spread=1e-6), toy(4, 0.504, call_spread=1e-6)]
    assert order(rows)[0] == "test.toy-c4"


def test_sdpa_stays_unless_beaten_by_more_than_the_noise() -> None:
    assert first([make_row(), toy(1, 0.99)]).slug == "torch.sdpa"
    assert first([make_row(), toy(1, 0.97)]).slug == "test.toy-c1"
    assert first([make_row(), toy(1, 0.97, call_spread=0.2)]).slug == "torch.sdpa"


def test_a_wide_interval_of_sdpa_ties_across_a_tenth_and_no_more() -> None:
    wide = make_row(call_spread=0.9)
    for spread in (0.001, 0.9):
        assert first([wide, toy(1, 1 / 1.96, call_spread=spread)]).slug == "test.toy-c1"
        assert first([wide, toy(1, 1 / 1.14, call_spread=spread)]).slug == "test.toy-c1"
        assert first([wide, toy(1, 1 / 1.10, call_spread=spread)]).slug == "torch.sdpa"


def test_a_tied_challenger_that_does_not_beat_sdpa_does_not_win() -> None:
    noisy = toy(1, 0.908, call_spread=0.12)
    rows = [make_row(), toy(9, 0.90), noisy]
    ranked = {place.slug: place for place in rank(rows, "eager", TOYS)}
    assert ranked[noisy.slug].tied
    assert not ranked[noisy.slug].beats_sdpa
    assert first(rows).slug == "test.toy-c9"


def test_without_a_row_of_sdpa_its_baseline_still_counts() -> None:
    slower = first([toy(1, 1.2)])
    assert (slower.slug, slower.beats_sdpa) == ("test.toy-c1", False)
    assert first([toy(1, 0.5)]).beats_sdpa


def test_where_sdpa_has_no_time_the_fastest_of_the_newest_run_wins() -> None:
    none = {"baseline_time_ms": None, "baseline_call_ms": None}
    ranked = rank(
        [
            failed("torch.sdpa", "out_of_memory", provenance=at(5), run="new", **none),
            toy(1, 7.0, provenance=at(5), run="new", **none),
            toy(2, 5.0, provenance=at(5), run="new", **none),
            toy(3, 0.1, provenance=at(1), run="old", **none),
        ],
        "eager",
        TOYS,
    )
    assert [place.slug for place in ranked] == ["test.toy-c2", "test.toy-c1"]
    assert all(place.speedup is None and place.beats_sdpa for place in ranked)


def test_each_mode_ranks_by_its_own_time() -> None:
    rows = [
        make_row(),
        toy(1, None, time_ms=0.4, call_ms=0.9),
        toy(2, None, time_ms=0.6, call_ms=0.7),
    ]
    assert first(rows, "graph").slug == "test.toy-c1"
    assert first(rows, "eager").slug == "test.toy-c2"


def test_absolute_times_of_different_runs_are_not_compared() -> None:
    # The clock fell to half in the second run: twice the times, the same ratio.
    fast_clock = toy(1, 0.60, run="a")
    slow_clock = toy(2, 1.00, run="b", baseline_time_ms=2.0, baseline_call_ms=2.0)
    assert first([make_row(), fast_clock, slow_clock]).slug == "test.toy-c2"


def test_the_hosts_part_of_sdpas_call_does_not_order_candidates_of_different_runs() -> None:
    sdpa = make_row(ms=None, time_ms=0.014, call_ms=0.028, run="a", baseline_time_ms=0.014)
    times = {"baseline_time_ms": 0.014}
    slow = toy(1, None, time_ms=0.022, call_ms=0.022, run="b", baseline_call_ms=0.034, **times)
    fast = toy(2, None, time_ms=0.0142, call_ms=0.0142, run="c", baseline_call_ms=0.020, **times)
    ranked = rank([replace(sdpa, baseline_call_ms=0.028), slow, fast], "eager", TOYS)
    assert [place.slug for place in ranked] == ["test.toy-c2", "test.toy-c1", "torch.sdpa"]
    assert ranked[0].speedup == pytest.approx(0.028 / 0.0142)
    assert ranked[2].speedup == 1.0


SHORT = {"baseline_time_ms": 0.008, "baseline_call_ms": 0.018}
SHORT_SDPA = make_row(ms=None, time_ms=0.008, call_ms=0.018, **SHORT)


def short(cost: int, time_ms: float, call_ms: float, **fields: object) -> Row:
    """A call that lasts as long as the host works on it, or nearly."""
    return toy(cost, None, time_ms=time_ms, call_ms=call_ms, **{**SHORT, **fields})


def test_calls_as_long_as_the_hosts_work_are_told_apart_by_device_time() -> None:
    rows = [
        short(1, 0.0088, 0.0097),  # the shortest call, by noise
        short(2, 0.0063, 0.0101),
        short(3, 0.0066, 0.0100),
        short(4, 0.0063, 0.0131, run="slow host", baseline_call_ms=0.024),
        short(5, 0.0094, 0.0094, run="other"),  # no call is shorter than the host's work
    ]
    ranked = rank([SHORT_SDPA, *rows], "eager", TOYS)
    assert [place.slug[-2:] for place in ranked] == ["c2", "c4", "c3", "c1", "c5", "pa"]
    assert [place.tied for place in ranked] == [True, True, False, False, False, False]
    assert [place.speedup for place in ranked[:5]] == pytest.approx([0.018 / 0.0097] * 5)
    # Without noise the order is that of the graph mode.
    assert order([SHORT_SDPA, *rows], "graph")[:3] == [place.slug for place in ranked[:3]]


def test_one_disturbed_call_is_no_measure_of_the_host() -> None:
    rows = [toy(1, 0.80), toy(2, None, time_ms=1.0, call_ms=1.15), toy(3, 0.95)]
    ranked = rank([make_row(), *rows], "eager", TOYS)
    assert [place.slug[-2:] for place in ranked] == ["c1", "c3", "pa", "c2"]
    assert ranked[0].speedup == pytest.approx(1.25)


def test_a_call_with_more_steps_on_the_host_than_others_of_its_run_is_longer() -> None:
    launched_twice = short(1, 0.005, 0.016)
    assert first([SHORT_SDPA, launched_twice, short(2, 0.006, 0.010)]).slug == "test.toy-c2"


def test_what_takes_longer_than_the_hosts_work_is_as_slow_as_its_device_time() -> None:
    ranked = rank([SHORT_SDPA, short(1, 0.014, 0.0142), short(2, 0.006, 0.010)], "eager", TOYS)
    assert [place.slug[-2:] for place in ranked] == ["c2", "c1", "pa"]
    assert ranked[1].speedup == pytest.approx(0.018 / 0.0142)
    assert not ranked[1].tied


def test_an_equal_call_that_leaves_the_device_free_earlier_wins() -> None:
    assert first([SHORT_SDPA, short(1, 0.0105, 0.0110), short(9, 0.0100, 0.0111)]).slug[-1] == "9"


def test_own_kernels_of_different_runs_differ_by_their_device_times() -> None:
    """An H200 that heats up between the sample of the device and that of the calls."""
    cool = {"run": "a", "baseline_time_ms": 1.6, "baseline_call_ms": 1.7}
    hot = {"run": "b", "baseline_time_ms": 1.8, "baseline_call_ms": 1.82}
    slow = toy(1, None, time_ms=1.32, call_ms=1.33, **cool)
    fast = toy(2, None, time_ms=1.44, call_ms=1.49, **hot)
    sdpa = make_row(ms=None, time_ms=1.8, call_ms=1.82, **hot)
    assert first([sdpa, slow, fast]).slug == "test.toy-c2"
    assert first([sdpa, slow, fast]).speedup == pytest.approx(1.82 / 1.49)


def test_other_libraries_calls_count_as_they_are() -> None:
    quick = make_row("sdpa.flash", None, time_ms=0.0085, call_ms=0.0090, **SHORT)
    assert first([SHORT_SDPA, quick, short(2, 0.006, 0.010)]).slug == "sdpa.flash"


def test_the_newest_run_counts() -> None:
    rows = [make_row(), toy(1, 0.5, provenance=at(1)), toy(1, 2.0, provenance=at(2), run="later")]
    (place,) = (place for place in rank(rows, "eager", TOYS) if place.slug == "test.toy-c1")
    assert place.speedup == pytest.approx(0.5)
    assert [row.run for row in place.rows] == ["later"]


def test_shapes_of_a_bucket_are_pooled_by_the_geometric_mean() -> None:
    ragged = replace(PROBLEM, seqlen_q=1000, seqlen_k=1000)
    place = first([make_row(), toy(1, 0.5), toy(1, 1.0 / 8, problem=ragged)])
    assert place.speedup == pytest.approx(4.0)
    assert [row.problem for row in place.rows] == [ragged, PROBLEM]


@pytest.mark.parametrize("status", ["wrong_result", "crashed", "timeout", "out_of_memory"])
def test_what_failed_last_is_out_of_the_whole_bucket(status: str) -> None:
    ragged = replace(PROBLEM, seqlen_q=1000, seqlen_k=1000)
    good = toy(1, 0.5, provenance=at(1))
    bad = failed(good.slug, status, problem=ragged, provenance=at(0), fingerprint="abc")
    assert order([make_row(), good, bad]) == ["torch.sdpa"]
    repaired = toy(1, 0.5, problem=ragged, provenance=at(2))
    assert order([make_row(), good, bad, repaired])[0] == good.slug
    skipped = failed(good.slug, "pruned", provenance=at(9))
    assert order([make_row(), good, skipped])[0] == good.slug


def test_nothing_to_rank() -> None:
    assert rank([], "eager", TOYS) == []
    assert rank([failed("torch.sdpa"), failed("torch.flash", "timeout")], "eager", TOYS) == []


times = st.floats(min_value=0.05, max_value=5.0)
spreads = st.none() | st.floats(min_value=0.0, max_value=0.3)
measured = st.lists(
    st.tuples(
        st.integers(0, 12),
        times,
        spreads,
        st.sampled_from(["ok", "ok", "ok", "crashed"]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=15,
)


def rows_of(
    drawn: list[tuple[int, float, float | None, str, int]], baseline: bool = True
) -> list[Row]:
    rows = [make_row()] if baseline else []
    for cost, ms, spread, status, minute in drawn:
        fields = {"call_spread": spread, "provenance": at(minute), "run": f"run-{minute}"}
        slug = f"test.toy-c{cost}"
        rows.append(
            toy(cost, ms, **fields) if status == "ok" else failed(slug, fingerprint="abc", **fields)
        )
    return rows


@given(measured, st.booleans(), st.randoms())
def test_the_order_of_rows_does_not_matter(
    drawn: list[tuple[int, float, float | None, str, int]], baseline: bool, rng: random.Random
) -> None:
    rows = rows_of(drawn, baseline)
    shuffled = rng.sample(rows, len(rows))
    assert rank(rows, "eager", TOYS) == rank(shuffled, "eager", TOYS)


@given(measured, st.booleans())
def test_ranks_are_sound(
    drawn: list[tuple[int, float, float | None, str, int]], baseline: bool
) -> None:
    rows = rows_of(drawn, baseline)
    ranked = rank(rows, "eager", TOYS)
    assert [place.rank for place in ranked] == list(range(1, len(ranked) + 1))
    assert len({place.slug for place in ranked}) == len(ranked)
    assert all(row.status == "ok" for place in ranked for row in place.rows)
    if not ranked:
        return
    top = ranked[0]
    assert top.tied
    fastest = max(ranked, key=lambda place: place.speedup or 0)
    assert fastest.tied
    simpler = [
        place
        for place in ranked[1:]
        if place.tied
        and (place.beats_sdpa or place.slug == "torch.sdpa")
        and TOYS.simplicity(place.slug) < TOYS.simplicity(top.slug)
    ]
    assert not simpler
    if baseline:
        assert top.slug == "torch.sdpa" or top.beats_sdpa


@given(measured, st.floats(min_value=1.0, max_value=3.0), st.data())
@settings(max_examples=200)
def test_getting_faster_never_costs_a_place(
    drawn: list[tuple[int, float, float | None, str, int]], factor: float, data: st.DataObject
) -> None:
    unique = list({cost: (cost, ms, sp, "ok", m) for cost, ms, sp, _, m in drawn}.values())
    rows = rows_of(unique)
    index = data.draw(st.integers(1, len(rows) - 1))
    slug = rows[index].slug

    def place() -> int:
        return next(p.rank for p in rank(rows, "eager", TOYS) if p.slug == slug)

    before = place()
    rows[index] = replace(rows[index], call_ms=(rows[index].call_ms or 0) / factor)
    assert place() <= before


@given(st.floats(0.05, 0.9), st.floats(0.0, 0.0099), st.permutations(range(6)))
def test_the_winner_of_a_tie_is_always_the_same(ms: float, gap: float, costs: list[int]) -> None:
    step = gap / 6
    rows = [toy(cost, ms * (1 + step * place)) for place, cost in enumerate(costs)]
    assert first([make_row(ms=1.0), *rows]).slug == "test.toy-c0"


def fingerprint(variant: Variant, target: str) -> str:
    assert target == "sm_90a"
    return "abc"


def answer(row: Row, registry: Registry = TOYS, **today: str) -> str:
    return validity(row, registry, fingerprint, replace(PROVENANCE, **today))


def test_a_row_is_current_where_everything_is_as_it_was() -> None:
    assert answer(toy(1, 0.5)) == CURRENT
    vendor = REGISTRY.find("torch.sdpa")
    assert vendor is not None
    row = make_row(fingerprint=f"torch=={vendor.version()}")  # type: ignore[union-attr]
    assert answer(row) == CURRENT
    assert validity(row, TOYS, fingerprint) == VALID


@pytest.mark.parametrize("changed", ["torch", "driver", "compiler"])
def test_a_row_of_other_versions_is_valid_but_not_current(changed: str) -> None:
    assert answer(toy(1, 0.5), **{changed: "another"}) == VALID
    assert answer(toy(1, 0.5), **{changed: ""}) == CURRENT  # unknown today: nothing to compare


def test_a_vendor_row_does_not_depend_on_the_compiler() -> None:
    vendor = TOYS.candidate("torch.sdpa")
    row = make_row(fingerprint=f"torch=={vendor.version()}")  # type: ignore[union-attr]
    assert answer(row, compiler="another") == CURRENT


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (make_row("test.toy-c1", fingerprint="abd"), "source has changed"),
        (make_row("test.toy-c99", fingerprint="abc"), "no such kernel"),
        (make_row("../../etc/passwd", fingerprint="abc"), "no such kernel"),
        (make_row("test.toy-c1; rm -rf /", fingerprint="abc"), "no such kernel"),
        (make_row(fingerprint="torch==1.0"), "torch==1.0"),
        (toy(1, 0.5, problem=replace(PROBLEM, dtype="bf16")), "dtype bf16"),
        (toy(1, 0.5, device=replace(H200, arch="sm_120")), "not made for architectures"),
        (toy(1, 0.5, device=replace(H200, arch="sm_13")), "sm_13"),
        (toy(1, 0.5, device=replace(H200, arch="'; --")), "arch"),
    ],
)
def test_a_row_that_no_longer_holds_says_why(row: Row, reason: str) -> None:
    found = answer(row)
    assert reason in found
    assert not is_valid(found)


def test_a_vendor_library_that_is_gone_makes_its_rows_invalid() -> None:
    gone = replace(VENDORS[1], slug="gone.kernel", library="no-such-distribution")
    registry = Registry((), (*VENDORS, gone))
    row = make_row("gone.kernel", fingerprint="no-such-distribution==1.0")
    assert "not installed" in answer(row, registry)


def test_limits_are_those_of_the_rows_device() -> None:
    seen: list[Limits] = []
    family = replace(TOY, target=lambda params, limits: seen.append(limits) or limits.arch)  # type: ignore[func-returns-value]
    assert answer(toy(1, 0.5), Registry((family,), VENDORS)) == CURRENT
    assert (seen[0].arch, seen[0].units) == ("sm_90a", 132)
