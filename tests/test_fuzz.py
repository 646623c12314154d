"""benchmarks/fuzz.py finds what is wrong, repeats it from its line, and finds nothing here."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from runtime_variants import require_runtime

import autofa
from autofa.bench.exact import Call, Truth

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    require_runtime()
    autofa.reload()  # its settings are those of this test
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fuzz

    return fuzz


def test_problems_are_repeatable(fuzz: ModuleType) -> None:
    import fuzz_problems as problems

    one, other = random.Random(3), random.Random(3)
    for _ in range(50):
        spec = problems.draw(one, "cpu")
        assert problems.Spec.from_json(spec.to_json()) == spec == problems.draw(other, "cpu")
        a, b = problems.make(spec, "cpu"), problems.make(spec, "cpu")
        for x, y in ((a.query, b.query), (a.key, b.key), (a.value, b.value)):
            assert x.stride() == y.stride()
            assert torch.equal(x.nan_to_num(0.5), y.nan_to_num(0.5))


def _last(out: torch.Tensor) -> torch.Tensor:
    return out[(-1,) * out.dim()]


SPOILED = {
    "values": lambda out: out * 1.05,
    "one element": lambda out: (_last(out).add_(1.0), out)[1],
    "nan": lambda out: (_last(out).fill_(torch.nan), out)[1],
    "strides": lambda out: out.mT.contiguous().mT,
    "shape": lambda out: out[..., :-1],
}


@pytest.mark.parametrize("what", list(SPOILED))
def test_a_wrong_answer_is_found_and_repeated(
    fuzz: ModuleType,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = autofa.attention

    def wrong(*args: object, **options: object) -> object:
        found = right(*args, **options)  # type: ignore[call-overload]
        out = found[0] if isinstance(found, tuple) else found
        spoiled = SPOILED[what](out) if out.numel() else out
        return (spoiled, *found[1:]) if isinstance(found, tuple) else spoiled

    monkeypatch.setattr(autofa, "attention", wrong)
    only = ["--kernel", "attention"]
    assert fuzz.main(["--count", "20", "--seed", "5", *only]) == 1
    line = next(x for x in capsys.readouterr().out.splitlines() if "--case" in x)
    case = ["--case", line.split("--case '")[1].rstrip("'"), *only]
    assert fuzz.main(case) == 1
    assert "1 problems" in capsys.readouterr().out
    monkeypatch.setattr(autofa, "attention", right)
    assert fuzz.main(case) == 0


def test_a_short_run_finds_nothing(fuzz: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--count", "400", "--seed", "11", "--seconds", "12"]) == 0, (
        capsys.readouterr().out
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
def test_a_long_run_finds_nothing(seed: int) -> None:
    command = [sys.executable, str(BENCHMARKS / "fuzz.py"), "--count", "5000", "--seed", str(seed)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_run_on_a_gpu_finds_nothing(fuzz: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--device", "cuda", "--count", "3000", "--seed", "1", "--seconds", "180"]
    assert fuzz.main(argv) == 0, capsys.readouterr().out


def test_a_device_that_is_not_here_is_bad_usage(fuzz: ModuleType) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(SystemExit) as caught:
        fuzz.main(["--device", "cuda"])
    assert caught.value.code == 2


def test_keys_that_are_all_hidden_by_the_lowest_number_weigh_alike() -> None:
    query, key = torch.randn(2, 1, 3, 8)
    value = torch.tensor([[[1.0], [2.0], [6.0]]])
    mask = torch.full((1, 1, 1), torch.finfo(torch.float32).min)
    truth = Truth(Call(query, key, value, mask, is_causal=True))
    assert truth.out.flatten().tolist() == pytest.approx([1.0, 1.5, 3.0])
