"""torch, the operator, the driver and the GPUs, as a process of their own finds them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofa import settings
from autofa.device import DeviceKey
from autofa.diagnosis.finding import Finding, info, ok, problem
from autofa.runtime.probe import STAGES

# Importing torch from a cold network disk has been seen to take a minute.
SECONDS = 90.0
# The package may have been found by a changed sys.path; the child must find the same one.
_BOOT = "import sys; sys.path.append(sys.argv[1]); from autofa.runtime.probe import main; main()"
_REINSTALL = (
    "install autofa again under this torch: "
    "`pip install --no-build-isolation --force-reinstall --no-deps .`"
)
_TRY = f"see what `{Path(sys.executable).name} -c 'import torch'` says, and mend that first"


@dataclass(frozen=True)
class Machine:
    """What the probe told.

    Attributes:
        driver: NVIDIA's, empty where there is none; `gpus` are those that it knows.
        torch: its version, empty where it cannot be imported: `torch_failure` says why.
        cuda: the release that torch was built with, empty for a build without.
        operator_failure: why the runtime operator does not load; None: it does.
        cuda_problem: why torch has no GPU; None: it has.
        devices: the keys of all devices that torch has.
        unusable: a kernel of another library -> why it cannot be used, though it is installed.
        death: how the probe died before it had told everything; empty if it did not.
    """

    driver: str = ""
    gpus: tuple[str, ...] = ()
    torch: str = ""
    torch_failure: str = ""
    cuda: str = ""
    operator_failure: str | None = None
    cuda_problem: str | None = None
    devices: tuple[DeviceKey, ...] = ()
    unusable: tuple[tuple[str, str], ...] = ()
    death: str = ""

    def kinds(self) -> tuple[str, ...]:
        """The kinds of device that kernels are built for here."""
        return ("cpu", "cuda") if self.cuda_problem is None and self.gpus_of_torch() else ("cpu",)

    def gpus_of_torch(self) -> tuple[DeviceKey, ...]:
        return tuple(key for key in self.devices if key.kind == "cuda")


def look(seconds: float = SECONDS) -> Machine:
    """Asks the probe, for so many seconds at most. Never raises."""
    root = str(Path(__file__).resolve().parents[2])
    # -B: not even byte code is written.
    command = [sys.executable, "-B", "-c", _BOOT, root, str(int(seconds) + 5)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return Machine(death=f"{sys.executable} cannot be started: {error}")
    expired = False
    out = err = b""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        expired = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=5)
        except subprocess.TimeoutExpired as stuck:  # in the driver, where no signal reaches it
            out, err = stuck.output or b"", stuck.stderr or b""
    return understand(out, err, process.poll(), seconds if expired else None)


def understand(out: bytes, err: bytes, code: int | None, expired: float | None) -> Machine:
    """The probe's lines as a `Machine`.

    Args:
        code: its exit code, negative for a signal.
        expired: the seconds after which it was stopped; None if it was not.
    """
    told: dict[str, dict[str, Any]] = {}
    for line in out.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            stage = json.loads(line)
            told[stage["stage"]] = stage
    driver, torch, operator, devices, vendors = (told.get(name, {}) for name in STAGES)
    death = ""
    complete = STAGES[-1] in told or "error" in torch
    if not complete:
        at = next(name for name in STAGES if name not in told)
        death = f"the process that looks at {at} {_end(err, code, expired)}"
    operator_failure = operator.get("error") or operator.get("reason")
    cuda_problem = devices.get("error") or devices.get("problem")
    return Machine(
        driver.get("version", ""),
        tuple(driver.get("gpus", ())),
        torch.get("version", ""),
        torch.get("error", ""),
        torch.get("cuda", ""),
        operator_failure,
        cuda_problem,
        tuple(DeviceKey(**key) for key in devices.get("keys", ())),
        tuple(vendors.get("failures", {}).items()),
        death,
    )


def _end(err: bytes, code: int | None, expired: float | None) -> str:
    if expired is not None:
        return f"gave no answer in {expired:g} s"
    if code is not None and code < 0:
        try:
            how = f"died of {signal.Signals(-code).name}"
        except ValueError:
            how = f"died of signal {-code}"
    else:
        how = f"ended with exit code {code}"
    last = err.decode(errors="replace").strip().splitlines()[-1:]
    return f"{how}: {last[0]}" if last else how


def torch_findings(machine: Machine) -> Iterator[Finding]:
    if machine.death:
        yield problem("torch", machine.death, _TRY)
    if machine.torch_failure:
        yield problem("torch", f"torch cannot be imported: {machine.torch_failure}", _TRY)
    if not machine.torch:
        return
    built = f"built with CUDA {machine.cuda}" if machine.cuda else "built without CUDA"
    yield ok("torch", f"torch {machine.torch}, {built}")
    if machine.operator_failure:
        yield problem(
            "torch", f"{machine.operator_failure}: every call goes to plain SDPA", _REINSTALL
        )
    elif machine.devices:
        yield ok("torch", "the runtime operator loads under it")


def gpu_findings(machine: Machine) -> Iterator[Finding]:
    if machine.driver:
        names = ", ".join(machine.gpus) or "no GPU"
        yield ok("gpu", f"NVIDIA driver {machine.driver}: {names}")
    for key in machine.gpus_of_torch():
        yield ok("gpu", f"{key} is used as sm_{key.arch.removeprefix('sm_')}")
    if not machine.torch or machine.death or machine.cuda_problem is None:
        return
    if not machine.gpus:
        yield info("gpu", f"{machine.cuda_problem}: the CPU is what is tuned and used")
    elif settings.gpus_are_hidden():
        yield info("gpu", "CUDA_VISIBLE_DEVICES hides the GPU", "unset it to use it")
    else:
        cure = "install a torch that is built with CUDA, for this driver"
        if machine.cuda:
            cure = "check the driver, CUDA_VISIBLE_DEVICES and the permissions of /dev/nvidia*"
        yield problem("gpu", f"there is a GPU, but {machine.cuda_problem}", cure)
