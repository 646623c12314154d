"""What a tune may be asked for: refused before any work, with got / supported / what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofa.errors import DTypeError, UsageError
from autofa.problem import bucket_of, check
from autofa.tuning.profile_files import find_profile
from autofa.tuning.profiles import PROFILE_NAMES
from autofa.tuning.request import DEFAULT_TRIALS, TuneRequest, make_request, parse_budget


def request(*args: object, **options: object) -> TuneRequest:
    make: Callable[..., TuneRequest] = make_request
    return make(*args, **{"device": "cpu", "db": "x.db", **options})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("1h", 3600), ("1.5m", 90), ("30", 30), (" 2H ", 7200)],
)
def test_budgets(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@given(st.text(max_size=8))
def test_a_budget_is_a_positive_time_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert 0 < parse_budget(text) < float("inf")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shapes": ["1,8,0,64"]}, "1 ..."),
        ({"shapes": ["1,8,-4,64"]}, "B,H,N,D"),
        ({"shapes": ["1,8,64"]}, "B,H,N,D"),
        ({"shapes": ["1,6/4,64,64"]}, "multiple of the key heads"),
        ({"shapes": "1,8,64,64"}, "a list"),
        ({"dtypes": ["f8"]}, "f32, f16, bf16"),
        ({"dtypes": []}, "f32, f16, bf16"),
        ({"profile": "qick"}, "did you mean quick?"),
        ({"profile": "none.toml"}, "readable file"),
        ({"trials": 0}, ">= 1"),
        ({"trials": True}, ">= 1"),
        ({"jobs": -1}, ">= 1"),
        ({"budget": "soon"}, "90s, 10m, 1h"),
        ({"budget": 0}, "90s, 10m, 1h"),
        ({"mode": "warp"}, "eager, graph"),
        ({"families": ["nope"]}, "autofa kernels"),
    ],
)
def test_bad_arguments_say_what_is_supported(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match="got") as caught:
        request(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_dtype_is_also_a_type_error() -> None:
    with pytest.raises(DTypeError):
        request(dtypes=["float8"])


def test_duplicates_are_removed_and_shapes_come_first() -> None:
    found = request("quick", shapes=["1,8,512,64", "2,4,99,64", "1,8,512,64"])
    quick = find_profile("quick", "cpu").problems
    assert [p.shape for p in found.problems[:2]] == ["1,8,512,64", "2,4,99,64"]
    assert len(found.problems) == len(set(found.problems)) == len(quick) + 1


def test_without_profile_and_shape_it_is_the_default_profile() -> None:
    assert request().problems == find_profile("default", "cpu").problems
    assert request().trials == find_profile("default", "cpu").trials


def test_a_shape_alone_is_that_one_problem() -> None:
    (problem,) = request(shapes=["1,8,1000,64"]).problems
    assert (problem.shape, problem.dtype, problem.mask) == ("1,8,1000,64", "f32", "none")
    (problem,) = request(shapes=["1,8,1000,64"], device="cuda:1").problems
    assert (problem.dtype, problem.device) == ("f16", "cuda")
    assert request(shapes=["1,8,1000,64"]).trials == DEFAULT_TRIALS


def test_dtypes_and_causal_replace_those_of_the_profile() -> None:
    found = request("quick", dtypes=["float16", "f16"], causal=True)
    assert {(p.dtype, p.mask) for p in found.problems} == {("f16", "causal")}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_built_in_profiles(device: str) -> None:
    """Possible problems, on their device, each the representative of its own bucket."""
    sizes = []
    for name in PROFILE_NAMES:
        problems = find_profile(name, device).problems
        sizes.append(len(problems))
        assert len({bucket_of(p) for p in problems}) == len(problems)
        for problem in problems:
            assert check(problem).device == device
            assert bucket_of(problem).problem == problem, problem
    assert sizes == sorted(sizes)
    assert sizes[0] >= 4


def test_the_smaller_profiles_are_in_the_larger_ones() -> None:
    for device in ("cpu", "cuda"):
        quick, default, full = (find_profile(name, device).problems for name in PROFILE_NAMES)
        assert set(quick) <= set(default) <= set(full)
