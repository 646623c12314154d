"""`report --regret`: what each rule would have chosen without a bucket's own rows, and its cost."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from click.testing import CliRunner
from store_samples import CPU, H200, make_row
from test_prediction import GRID, UNTUNED, best, call, millis, tuned

from autofa.cli import report as report_command
from autofa.kernels import REGISTRY
from autofa.kernels.vendor import BASELINE
from autofa.problem import Problem, bucket_of
from autofa.reporting.regret import NOTHING, RULES, Regret, regrets, render_regret
from autofa.reporting.tables import FORMATS
from autofa.store.rows import Row


def valid(row: Row) -> str:
    return "valid"


def of(rows: Sequence[Row], mode: str = "eager") -> Regret:
    (found,) = regrets(rows, mode, REGISTRY, valid)
    return found


def test_costs_are_those_of_the_device() -> None:
    problems = [*GRID, *UNTUNED]
    found = of(tuned(problems))
    assert {case.bucket for case in found.cases} == {bucket_of(problem) for problem in problems}
    for case in found.cases:
        least = millis(best(case.bucket.problem, "eager"), case.bucket.problem)[1]
        for kernel, regret in zip(case.kernels, case.regrets, strict=True):
            took = millis(kernel, case.bucket.problem)[1]
            assert regret == pytest.approx(math.log(took / least), abs=1e-9)
        assert case.kernels[RULES.index("plain SDPA")] == BASELINE
        assert case.beside_sdpa <= 1e-9, "never slower than plain SDPA"


def test_the_dispatcher_loses_less_than_the_others() -> None:
    found = of(tuned([*GRID, *UNTUNED], noise=0.005))
    means = [found.mean(rule) for rule in range(len(RULES))]
    assert means[0] < 0.03
    assert means[0] < means[1] < means[2]
    assert found.mean(0) <= found.p95(0) <= math.expm1(found.worst(0).regrets[0])


def test_the_bucket_itself_is_not_looked_at() -> None:
    """A kernel that is fast in one bucket only is not foreseen there, and not chosen elsewhere."""
    rows = [
        replace(row, time_ms=1e-6, call_ms=1e-6)
        if row.slug == "torch.flash" and row.problem == GRID[2]
        else row
        for row in tuned(GRID)
    ]
    case = next(c for c in of(rows).cases if c.bucket == bucket_of(GRID[2]))
    assert case.best == "torch.flash"
    assert "torch.flash" not in case.kernels
    assert case.regrets[0] > 5


def test_what_was_not_measured_in_a_bucket_cannot_be_chosen_there() -> None:
    winner = of(tuned(GRID)).cases[0].kernels[0]
    bucket = of(tuned(GRID)).cases[0].bucket
    rows = [row for row in tuned(GRID) if (row.slug, row.bucket) != (winner, bucket)]
    case = of(rows).cases[0]
    assert case.bucket == bucket
    assert winner not in case.kernels


def test_only_rows_that_hold_and_buckets_that_are_asked_for() -> None:
    rows = tuned(GRID)
    assert regrets(rows, "eager", REGISTRY, lambda row: "stale") == []
    (one,) = regrets(rows, "eager", REGISTRY, valid, [bucket_of(GRID[1])])
    assert [case.bucket for case in one.cases] == [bucket_of(GRID[1])]
    assert regrets([make_row()], "eager", REGISTRY, valid) == []


def test_the_percentile_is_interpolated() -> None:
    found = of(tuned(GRID))
    cases = tuple(
        replace(found.cases[0], regrets=(math.log1p(at / 100), 0.0, 0.0)) for at in range(101)
    )
    assert Regret(H200, "eager", cases).p95(0) == pytest.approx(0.95)


@pytest.mark.parametrize("form", FORMATS)
def test_formats(form: str) -> None:
    found = regrets(tuned(GRID), "graph", REGISTRY, valid)
    text = render_regret(found, form)
    assert text.endswith("\n")
    if form == "json":
        (document,) = json.loads(text, parse_constant=pytest.fail)
        assert (document["device"], document["mode"]) == ("NVIDIA H200", "graph")
        assert [rule["rule"] for rule in document["rules"]] == list(RULES)
        assert len(document["cases"]) == len(GRID)
        assert document["cases"][0]["regret"].keys() == set(RULES)
        assert json.loads(render_regret([], form)) == []
    elif form == "csv":
        lines = list(csv.DictReader(io.StringIO(text)))
        assert [line["rule"] for line in lines] == list(RULES)
        assert float(lines[0]["mean"]) >= 0
    else:
        assert all(rule in text for rule in RULES)
        assert NOTHING in render_regret([], form)


@pytest.mark.parametrize("option", [["--top", "3"], ["--all"]])
def test_options_that_list_kernels_do_not_go_with_it(option: list[str]) -> None:
    result = CliRunner().invoke(report_command.report, ["--regret", *option])
    assert option[0] in str(result.exception)


def test_a_cpu_by_its_own_rows() -> None:
    problem: Problem = call("1,8,256,64", "f32", device="cpu")
    rows = [make_row(s, ms, problem=problem, device=CPU)
            for s, ms in ((BASELINE, 1.0), ("torch.flash", 0.5))]  # fmt: skip
    case = of(rows).cases[0]
    assert case.kernels[1:] == (BASELINE, BASELINE)
    assert case.rung != "measured"
