"""Machines without a CUDA toolkit, a CUDA build of torch or a GPU: all works, and what is missing
is said in one line."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import autofa
from autofa.cli import _run
from autofa.compiler import toolchain
from autofa.dispatch import state
from autofa.runtime import devices

ENVIRONMENTS = {
    "no nvcc": {"PATH": str(Path(sys.executable).parent), "CUDA_HOME": None},
    "CUDA_HOME of nothing": {"CUDA_HOME": "/nonexistent"},
    "a compiler for nvcc that is not there": {"NVCC_CCBIN": "/nonexistent/g++"},
    **{
        f"TORCH_CUDA_ARCH_LIST={text!r}": {"TORCH_CUDA_ARCH_LIST": text}
        for text in ("All", "", "9.0a", "12.0+PTX", "abc")
    },
}


@pytest.fixture(params=list(ENVIRONMENTS))
def _environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_pip_nvcc", lambda: None)
    for name, value in ENVIRONMENTS[request.param].items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_environment")
def test_attention_and_report_need_no_toolkit(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="autofa")
    state.reload()
    with torch.no_grad():
        q, k, v = (torch.randn(1, 2, 65, 16) for _ in range(3))
        assert torch.allclose(autofa.attention(q, k, v), sdpa(q, k, v), atol=1e-5)
    assert _run(["report"]) == 0
    assert _run(["kernels", "--limits", "H200"]) == 0
    assert capsys.readouterr().err == ""
    assert not caplog.records
    state.reload()


MISSING = {
    "torch": ("13.0", None, "is built without CUDA"),
    "GPU": (None, 0, "no NVIDIA GPU is visible (driver, permissions, CUDA_VISIBLE_DEVICES)"),
    "driver": (None, 1, "the NVIDIA driver does not work with this torch"),
}


@pytest.mark.parametrize("what", list(MISSING))
def test_tune_says_which_of_them_is_missing(
    what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built_without, count, words = MISSING[what]
    monkeypatch.setattr(torch.version, "cuda", None if built_without else "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked: list[str] = []

    def run(request: object, on_event: object) -> None:
        asked.append(request.device)  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr("autofa.tuning.session.tune", run)
    assert words in (devices.cuda_problem() or "")
    assert _run(["tune", "--gpu-profile", "quick"]) == 130
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("no usable CUDA GPU: ")
    assert words in first
    assert first.endswith("; profiling the CPU")
    assert asked == ["cpu"]
    assert _run(["tune", "--gpu-profile", "quick", "--device", "cuda"]) == 2
    assert words in capsys.readouterr().err
    assert asked == ["cpu"]
