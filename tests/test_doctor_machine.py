"""What `autofa doctor` understands of torch and of GPUs, however their process ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autofa.device import DeviceKey, cpu_key
from autofa.diagnosis.checkup import vendor_findings
from autofa.diagnosis.finding import Finding
from autofa.diagnosis.machine import Machine, gpu_findings, look, torch_findings, understand
from autofa.kernels import REGISTRY

CPU = cpu_key(2)
H200 = DeviceKey("cuda", "NVIDIA H200", "sm_90", 132, 140)


def lines(*stages: dict[str, object]) -> bytes:
    return b"".join(json.dumps(stage).encode() + b"\n" for stage in stages)


DRIVER: dict[str, object] = {"stage": "driver", "version": "580.1", "gpus": ["NVIDIA H200"]}
NO_DRIVER: dict[str, object] = {"stage": "driver", "version": "", "gpus": []}
TORCH: dict[str, object] = {"stage": "torch", "version": "2.13.0", "cuda": "13.0"}
OPERATOR: dict[str, object] = {"stage": "operator", "reason": None}
NO_GPU: dict[str, object] = {"stage": "devices", "problem": "no GPU", "keys": [vars(CPU)]}
VENDORS: dict[str, object] = {"stage": "vendors", "failures": {}}
GPU: dict[str, object] = {"stage": "devices", "problem": None, "keys": [vars(CPU), vars(H200)]}


def findings_of(found: Machine) -> list[Finding]:
    return [*torch_findings(found), *gpu_findings(found)]


def test_a_sound_machine_with_a_gpu() -> None:
    found = understand(lines(DRIVER, TORCH, OPERATOR, GPU, VENDORS), b"", 0, None)
    assert found.devices == (CPU, H200)
    assert found.kinds() == ("cpu", "cuda")
    assert {finding.level for finding in findings_of(found)} == {"ok"}


@pytest.mark.parametrize(
    ("stages", "code", "expired", "words"),
    [
        ((NO_DRIVER,), -11, None, "looks at torch died of SIGSEGV: last words"),
        ((DRIVER, TORCH), -9, 90.0, "looks at operator gave no answer in 90 s"),
        ((DRIVER, TORCH, OPERATOR), 1, None, "looks at devices ended with exit code 1"),
        ((), None, 90.0, "looks at driver gave no answer"),
        ((NO_DRIVER, {"stage": "torch", "error": "OSError: libcudart"}), 0, None, "libcudart"),
        (
            (
                NO_DRIVER,
                TORCH,
                {"stage": "operator", "reason": "undefined symbol"},
                NO_GPU,
                VENDORS,
            ),
            0,
            None,
            "undefined symbol: every call goes to plain SDPA",
        ),
        ((DRIVER, TORCH, OPERATOR, NO_GPU, VENDORS), 0, None, "there is a GPU, but no GPU"),
    ],
)
def test_machines_that_are_not_sound(
    stages: tuple[dict[str, object], ...], code: int, expired: float | None, words: str
) -> None:
    found = understand(lines(*stages) + b"half a li", b"x\nlast words\n", code, expired)
    said = [finding for finding in findings_of(found) if finding.level == "problem"]
    assert len(said) == 1
    assert words in said[0].found
    assert said[0].cure


def test_an_installed_library_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = next(kernel for kernel in REGISTRY.vendors if kernel.library != "torch")
    failing = {**VENDORS, "failures": {kernel.slug: "undefined symbol: _ZN3c10"}}
    found = understand(lines(NO_DRIVER, TORCH, OPERATOR, NO_GPU, failing), b"", 0, None)
    monkeypatch.setattr(type(kernel), "version", lambda self: None)
    assert {finding.level for finding in vendor_findings(found)} == {"info"}
    monkeypatch.setattr(type(kernel), "version", lambda self: "1.2")
    said = [finding for finding in vendor_findings(found) if finding.level == "problem"]
    assert ["undefined symbol" in finding.found for finding in said] == [True]


def test_a_gpu_that_is_hidden_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = understand(lines(DRIVER, TORCH, OPERATOR, NO_GPU, VENDORS), b"", 0, None)
    assert "problem" not in {finding.level for finding in findings_of(found)}


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def make(text: str) -> None:
        (tmp_path / "fake" / "torch").mkdir(parents=True)
        (tmp_path / "fake" / "torch" / "__init__.py").write_text(text)
        root = str(Path(__file__).parent.parent)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'fake'}:{root}")

    return make


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise ImportError('libtorch_cuda.so: not found')", "libtorch_cuda.so: not found"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "torch died of SIGSEGV"),
        ("import os; os._exit(7)", "torch ended with exit code 7"),
        ("import time; time.sleep(60)", "torch gave no answer in 2 s"),
        ("import sys; sys.exit('stop')", "torch ended with exit code 1: stop"),
    ],
)
def test_a_torch_that_is_broken(fake_torch: Callable[[str], None], text: str, words: str) -> None:
    fake_torch(text)
    started = time.monotonic()
    found = look(2)
    assert time.monotonic() - started < 10
    (said,) = [finding for finding in findings_of(found) if finding.level == "problem"]
    assert words in said.found
