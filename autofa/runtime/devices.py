"""torch's devices as `DeviceKey` and `Limits`."""

from __future__ import annotations

from functools import lru_cache

import torch

from autofa.device import (
    DeviceKey,
    Limits,
    capability_limits,
    cpu_key,
    cpu_limits,
)
from autofa.errors import DeviceError, UsageError, explain_bad

_GIB = 1 << 30


def device_key(device: torch.device | str) -> DeviceKey:
    """What measurements on this device are keyed by.

    On CPU it depends on the number of threads torch uses now. `cuda` without an ordinal is the
    current device.

    Raises:
        DeviceError: another kind of device, or a GPU that is not there.
    """
    kind, index = _resolve(device)
    return cpu_key(torch.get_num_threads()) if kind == "cpu" else _cuda_key(index)


def limits(device: torch.device | str) -> Limits:
    """What a kernel may use there.

    A GPU older than the architectures this version knows has no shared memory to give, so that no
    own kernel is legal on it; a newer one is taken for the newest of them.

    Raises:
        DeviceError: as `device_key`.
    """
    kind, index = _resolve(device)
    if kind == "cpu":
        return cpu_limits(torch.get_num_threads())
    key = _cuda_key(index)
    capability = int(key.arch.removeprefix("sm_"))
    try:
        return capability_limits(capability, key.units)
    except UsageError:
        return Limits("cuda", key.arch, capability, units=key.units)


def find_device(text: str | None) -> torch.device:
    """The device of that name (`cpu`, `cuda`, `cuda:1`); None: a GPU if there is one, else the CPU.

    Raises:
        DeviceError: another name, or a device that is not there.
    """
    if text is None:
        return torch.device("cpu") if cuda_problem() else torch.device("cuda", 0)
    try:
        device = torch.device(text.strip().lower())
    except RuntimeError:
        raise _unsupported(text) from None
    kind, index = _resolve(device)
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", index)


def cuda_names() -> tuple[str, ...]:
    """All GPUs that torch sees, as it names them. Of MIG slices it sees one.

    Raises:
        DeviceError: there is none.
    """
    problem = cuda_problem()
    if problem is not None:
        do = f"use that: {problem}"
        raise DeviceError(explain_bad("device", "all", "cpu", do))
    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


def uuid_of(name: str) -> str:
    """What names this GPU in every process; empty where torch does not tell (before 2.4)."""
    return str(getattr(torch.cuda.get_device_properties(torch.device(name)), "uuid", ""))


def cuda_of_uuid(uuid: str) -> str:
    """The GPU of that UUID, as torch names it in this process.

    Raises:
        DeviceError: this process does not see it.
    """
    names = cuda_names()
    found = [name for name in names if uuid_of(name) == uuid]
    if not found:
        do = "leave CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER as they were"
        raise DeviceError(explain_bad("GPU", uuid, ", ".join(map(uuid_of, names)), do))
    return found[0]


def cuda_problem() -> str | None:
    """Why there is no usable CUDA GPU; None if there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if torch.cuda.device_count() == 0:
        return "no NVIDIA GPU is visible (driver, permissions, CUDA_VISIBLE_DEVICES)"
    if not torch.cuda.is_available():
        return "the NVIDIA driver does not work with this torch"
    return None


def _unsupported(device: object) -> DeviceError:
    return DeviceError(
        explain_bad("device", str(device), "cpu, cuda, cuda:N", "choose one of these")
    )


def _resolve(device: torch.device | str) -> tuple[str, int]:
    device = torch.device(device)
    if device.type == "cpu":
        return "cpu", 0
    if device.type != "cuda":
        raise _unsupported(device)
    problem = cuda_problem()
    if problem is not None:
        raise DeviceError(explain_bad("device", str(device), "cpu", f"use that: {problem}"))
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        names = ", ".join(f"cuda:{i}" for i in range(count))
        raise DeviceError(
            explain_bad("device", str(device), f"cpu, {names}", "choose one of these")
        )
    return "cuda", index


@lru_cache(maxsize=64)
def _cuda_key(index: int) -> DeviceKey:
    properties = torch.cuda.get_device_properties(index)
    return DeviceKey(
        "cuda",
        properties.name,
        f"sm_{properties.major}{properties.minor}",
        properties.multi_processor_count,
        round(properties.total_memory / _GIB),
    )
