"""What a measurement was made with: versions, and the state of the device while it ran."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import torch

from autofa._version import __version__
from autofa.store.rows import Provenance

_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


@contextlib.contextmanager
def _nvml(device: torch.device) -> Iterator[tuple[Any, Any] | None]:
    """(pynvml, handle of this very device by its UUID), or None where NVML cannot be had."""
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        # A MIG slice, whose UUID has another form; it has no clocks of its own either.
        handle = None
    try:
        yield None if handle is None else (pynvml, handle)
    finally:
        pynvml.nvmlShutdown()


def _gpu_state(device: torch.device) -> dict[str, object]:
    with _nvml(device) as found:
        if found is None:
            return {}
        nvml, handle = found
        readings: dict[str, Callable[[], object]] = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) // 1000,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) // 1000,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "throttling": lambda: [
                name
                for bit, name in _REASONS.items()
                if nvml.nvmlDeviceGetCurrentClocksEventReasons(handle) & bit
            ],
        }
        state: dict[str, object] = {}
        for name, read in readings.items():
            # Virtual machines and consumer cards refuse some of these.
            with contextlib.suppress(nvml.NVMLError, AttributeError):
                state[name] = read()
        return state


def conditions(device: torch.device, waited: float = 0.0) -> str:
    """The device's state now as a JSON object: clocks, power, temperature, throttling (GPU), load
    average, threads, and `waited`, the share of the timing for which our threads had no core. What
    cannot be read is left out. Costs a few ms on CUDA."""
    state = _gpu_state(device) if device.type == "cuda" else {}
    state["waited"] = round(waited, 3)
    state["threads"] = torch.get_num_threads()
    with contextlib.suppress(OSError):
        state["load"] = round(os.getloadavg()[0], 2)
    return json.dumps(state, sort_keys=True)


def _driver(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    with _nvml(device) as found:
        if found is None:
            return ""
        version = found[0].nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)


def provenance(device: torch.device, compiler: str, details: str = "{}") -> Provenance:
    """The provenance of rows measured now.

    Args:
        compiler: what compiled the own kernels; empty for vendor kernels.
        details: `TimingRun.conditions`; `{}` for what was never timed.
    """
    return Provenance(
        autofa=__version__,
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        driver=_driver(device),
        compiler=compiler,
        host=platform.node(),
        created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        details=details,
    )
