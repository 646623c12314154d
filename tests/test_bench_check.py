"""The check, on candidates that are wrong in one way each."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from poison.families import HONEST

from autofa.bench.cases import cases_for
from autofa.bench.check import Truths, check
from autofa.bench.inputs import Inputs
from autofa.bench.native import Kernel, plain_sdpa
from autofa.bench.protocol import Case
from autofa.device import cpu_limits
from autofa.kernels.vendor import SDPA
from autofa.problem import DTYPES, Problem

CPU = torch.device("cpu")
LIMITS = cpu_limits(2)


def problem(dtype: str = "f32", mask: str = "none", n: int = 160, d: int = 32) -> Problem:
    return Problem(dtype, 1, 2, 2, n, n, d, d, mask, "cpu")


def weights(inputs: Inputs) -> torch.Tensor:
    scores = inputs.query.double() @ inputs.key.double().mT / math.sqrt(inputs.problem.head_dim)
    if inputs.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def exact(inputs: Inputs) -> torch.Tensor:
    return (weights(inputs).softmax(-1) @ inputs.value.double()).to(inputs.query.dtype)


def candidate(
    compute: Callable[[Inputs], torch.Tensor] = exact,
    after: Callable[[Inputs, torch.Tensor, torch.Tensor], None] | None = None,
) -> Kernel:
    """A kernel whose values are `compute`'s; `after` may spoil the memory it was given."""

    def write(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        assert lse is not None
        out.copy_(compute(inputs))
        lse.copy_(weights(inputs).logsumexp(-1))
        if after is not None:
            after(inputs, out, lse)

    return Kernel("test", lambda inputs: lambda: compute(inputs), write, deterministic=True)


def cases(given: Problem) -> list[Case]:
    return [Case("guarded", given, repeat=True), Case("called", given, guarded=False)]


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exact_candidate_and_plain_sdpa_pass(dtype: str, mask: str) -> None:
    truths = Truths(CPU)
    given = problem(dtype, mask)
    for kernel in (candidate(), Kernel("torch.sdpa", plain_sdpa)):
        todo = cases(given) if kernel.write else cases(given)[1:]
        result = check(kernel, todo, truths)
        assert result.ok, result.message
        assert result.error is not None
        assert 0 < result.error < 0.02


def drop_last_keys(count: int) -> Callable[[Inputs], torch.Tensor]:
    def compute(inputs: Inputs) -> torch.Tensor:
        scores = weights(inputs)[..., :-count]
        values = inputs.value.double()[:, :, :-count]
        return (scores.softmax(-1) @ values).nan_to_num().to(inputs.query.dtype)

    return compute


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_few_lost_keys_are_seen_among_many(dtype: str) -> None:
    given = problem(dtype, n=1024)
    result = check(candidate(drop_last_keys(16)), cases(given), Truths(CPU))
    assert not result.ok
    assert "instead of" in result.message


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_wrong_last_row_of_a_causal_problem_is_seen(dtype: str) -> None:
    # Late rows of a causal problem are small beside the first ones' rounding errors.
    def compute(inputs: Inputs) -> torch.Tensor:
        scores = weights(inputs)
        scores[:, :, -1, -40:] = -math.inf
        return (scores.softmax(-1) @ inputs.value.double()).to(inputs.query.dtype)

    result = check(candidate(compute), cases(problem(dtype, "causal", n=1024)), Truths(CPU))
    assert not result.ok
    assert "1023" in result.message


def test_tf32_does_not_pass_for_f32() -> None:
    def compute(inputs: Inputs) -> torch.Tensor:
        def rounded(x: torch.Tensor) -> torch.Tensor:
            return (x.contiguous().view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)

        scores = rounded(inputs.query) @ rounded(inputs.key).mT / math.sqrt(inputs.problem.head_dim)
        return scores.softmax(-1) @ inputs.value

    assert not check(candidate(compute), cases(problem())[1:], Truths(CPU)).ok


def test_nan_never_passes() -> None:
    def compute(inputs: Inputs) -> torch.Tensor:
        out = exact(inputs)
        out[0, 1, 7, 3] = math.nan
        return out

    result = check(candidate(compute), cases(problem())[1:], Truths(CPU))
    assert (result.ok, result.error) == (False, math.inf)
    assert "(0, 1, 7, 3)" in result.message


def no_write(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    # As it was handed over: the canary is a NaN with this pattern.
    out[0, 1, -1].view(torch.int32).fill_(0x7FC5A5A5)


def write_behind(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    behind = out.as_strided((1,), (1,), out.storage_offset() + out.shape[2] * out.stride(2))
    behind.fill_(0.0)


def write_behind_lse(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    lse.as_strided((1,), (1,), lse.storage_offset() + lse.numel()).fill_(0.0)


def write_query(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    inputs.query[0, 0, 0, 0] += 1


def wrong_lse(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    lse.mul_(1 / math.log(2))


@pytest.mark.parametrize(
    ("after", "message", "outside"),
    [
        (no_write, "32 elements of the output were not written", False),
        (write_behind, "wrote outside the output", True),
        (write_behind_lse, "wrote outside the log-sum-exp", True),
        (write_query, "wrote to its inputs", True),
        (wrong_lse, "log-sum-exp", False),
    ],
)
def test_memory_is_watched(
    after: Callable[[Inputs, torch.Tensor, torch.Tensor], None], message: str, outside: bool
) -> None:
    result = check(candidate(after=after), cases(problem()), Truths(CPU))
    assert not result.ok
    assert message in result.message
    assert result.wrote_outside == outside


def test_a_race_shows_as_two_results() -> None:
    calls = 0

    def compute(inputs: Inputs) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return exact(inputs) * (1 + calls * 2e-7)

    result = check(candidate(compute), cases(problem()), Truths(CPU))
    assert "two runs on the same input differ" in result.message


def test_reading_past_the_tail_gives_nan() -> None:
    def compute(inputs: Inputs) -> torch.Tensor:
        if not inputs.frames:
            return exact(inputs)
        p = inputs.problem
        shape = (*inputs.value.shape[:2], p.seqlen_k + 1, p.head_dim_v)
        longer = inputs.value.as_strided(
            shape, inputs.value.stride(), inputs.value.storage_offset()
        )
        # Weight 0 on the row behind the last: 0 * NaN.
        padded = torch.nn.functional.pad(weights(inputs).softmax(-1), (0, 1))
        return (padded @ longer.double()).to(inputs.query.dtype)

    result = check(candidate(compute), cases(problem()), Truths(CPU))
    assert not result.ok
    assert "got nan" in result.message


def test_truths_are_shared_between_layouts_and_candidates() -> None:
    truths = Truths(CPU)
    given = problem()
    first = truths.truth(Case("a", given))
    assert truths.truth(Case("b", given, layout="bnhd", guarded=False)) is first
    assert truths.truth(Case("c", given, seed=1)) is not first


def test_cases_cover_what_the_declaration_serves() -> None:
    given = problem(mask="causal")
    variant = HONEST.default_variant(given, LIMITS)
    if variant is None:
        pytest.skip("this CPU is older than x86-64-v3")
    found = cases_for(variant, given, LIMITS)
    assert found[-1].problem == given
    assert not found[-1].guarded
    assert all(case.guarded for case in found[:-1])
    assert any(case.problem.heads_kv < case.problem.heads_q for case in found)
    assert any(case.problem.seqlen_q < case.problem.seqlen_k for case in found)
    assert any(case.problem.seqlen_q > case.problem.seqlen_k for case in found)
    assert {case.layout for case in found} == {"bhnd", "bnhd"}
    assert any(case.logits > 10 for case in found)
    assert not any(case.guarded for case in cases_for(SDPA, given, LIMITS))
