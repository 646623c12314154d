"""What the tests of `autofa doctor` share: a machine that is made up, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from store_samples import fill, make_row

from autofa.cli import _run
from autofa.compiler import cache, fingerprint
from autofa.device import DeviceKey, cpu_key, cpu_limits
from autofa.diagnosis import compilers, machine
from autofa.diagnosis.finding import Finding
from autofa.diagnosis.machine import Machine
from autofa.kernels import REGISTRY
from autofa.kernels.family import Variant
from autofa.kernels.vendor import BASELINE
from autofa.problem import parse_shape
from autofa.store.rows import Row

CPU = cpu_key(2)
H200 = DeviceKey("cuda", "NVIDIA H200", "sm_90", 132, 140)
SHAPE = parse_shape("1,2,33,16", dtype="f32", device="cpu")


def here(**fields: object) -> Machine:
    """A sound machine without a GPU."""
    sound = Machine(torch="2.13.0+cpu", cuda_problem="built without CUDA", devices=(CPU,))
    return replace(sound, **fields)  # type: ignore[arg-type]


def sound_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spares a test the process that imports torch, and the compilers that it does not need."""
    monkeypatch.setattr(machine, "look", here)
    monkeypatch.setattr(compilers, "trial_problem", lambda *a: None)
    monkeypatch.setenv("AUTOFA_CACHE_DIR", str(tmp_path / "cache"))


def diagnose(capsys: pytest.CaptureFixture[str]) -> tuple[int, list[Finding]]:
    """The exit code and the findings, which both forms of output must show."""
    code = _run(["doctor", "--format", "json"])
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out, parse_constant=lambda text: pytest.fail(text))
    findings = [Finding(**entry) for entry in found["findings"]]
    problems = [finding for finding in findings if finding.level == "problem"]
    assert found["problems"] == len(problems)
    assert code == (1 if problems else 0)
    assert all(finding.cure for finding in problems)
    assert all("\n" not in finding.found for finding in findings)
    return code, findings


def told(findings: Sequence[Finding], area: str, level: str) -> str:
    return " | ".join(
        f"{f.found} -> {f.cure}" for f in findings if (f.area, f.level) == (area, level)
    )


def rows_of_cpu(slug: str = BASELINE, **fields: object) -> list[Row]:
    mark = f"torch=={REGISTRY.candidate(BASELINE).version()}"  # type: ignore[union-attr]
    values = {"device": CPU, "problem": SHAPE, "fingerprint": mark}
    return [make_row(slug, **{**values, **fields})]


def winner() -> Variant:
    """A variant that is not prebuilt."""
    family = REGISTRY.family("cpu.flash")
    return next(
        variant
        for variant in family.points(SHAPE)
        if variant.refusal(SHAPE, cpu_limits()) is None
        and cache.prebuilt_library(variant, cpu_limits().arch) is None
    )


def missing_winner(path: Path) -> Variant:
    variant = winner()
    mark = fingerprint(variant, cpu_limits().arch)
    fill(path, *rows_of_cpu(variant.slug, fingerprint=mark, ms=0.5), *rows_of_cpu())
    return variant


def refuse(error: Exception, *arguments: object, **options: object) -> None:
    raise error
