"""What torch, the operator and the GPUs are like, told line by line: a program of its own.

It is run apart because each of its steps can take its process down, or never come back: a torch of
another CUDA, a driver that hangs. What was told before that happened stays told.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

# In the order in which they are told; each line's object bears its name.
STAGES = ("driver", "torch", "operator", "devices", "vendors")


def _driver() -> dict[str, object]:
    """NVIDIA's driver and its GPUs as NVML sees them, those hidden from CUDA too."""
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception:
        return {"version": "", "gpus": []}

    def text(value: Any) -> str:
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    names = [text(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    return {"version": text(pynvml.nvmlSystemGetDriverVersion()), "gpus": names}


def _torch() -> dict[str, object]:
    import torch

    return {"version": str(torch.__version__), "cuda": torch.version.cuda or ""}


def _operator() -> dict[str, object]:
    from autofa.runtime import extension

    return {"reason": extension.reason()}


def _devices() -> dict[str, object]:
    from autofa.runtime import devices

    problem = devices.cuda_problem()
    places = ["cpu"]
    if problem is None:
        import torch

        places += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    keys = [vars(devices.device_key(place)) for place in places]
    return {"problem": problem, "keys": keys}


def _vendors() -> dict[str, object]:
    """Kernels of other libraries that are installed, and cannot be used all the same."""
    from autofa.errors import LaunchError
    from autofa.kernels import REGISTRY
    from autofa.runtime import vendors

    failures = {}
    for kernel in REGISTRY.vendors:
        if kernel.library != "torch" and kernel.version() is not None:
            try:
                vendors.load(kernel.slug)
            except LaunchError as error:
                failures[kernel.slug] = " ".join(str(error).split())
    return {"failures": failures}


def main() -> None:
    """Tells every stage in one line of JSON on stdout, which nothing else gets to. Ends by itself
    after as many seconds as the last argument says, whatever hangs."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(sys.argv[-1]))
    told = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(told, "w") as out:
        for name, look in zip(
            STAGES, (_driver, _torch, _operator, _devices, _vendors), strict=True
        ):
            try:
                said = look()
            except Exception as error:
                said = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
            print(json.dumps({"stage": name, **said}), file=out, flush=True)
            if name == "torch" and "error" in said:
                return
