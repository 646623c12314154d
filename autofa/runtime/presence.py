"""What can be known of torch and of GPUs without importing torch, which takes over a second."""

from __future__ import annotations

import ctypes
import re
from importlib.util import find_spec
from pathlib import Path


def cuda_driver() -> bool:
    """Whether NVIDIA's driver library is here. Without it torch finds no GPU; with it, it may."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def torch_version() -> str:
    """`torch.__version__`, build tag included; empty where no torch is installed.

    The package's metadata lack the tag of wheels from PyPI.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = ['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    if found is not None:
        return found.group(1)
    import torch

    return str(torch.__version__)
