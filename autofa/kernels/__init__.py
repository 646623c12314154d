"""The candidates: own kernel families and vendor kernels, as data.

Adding a family: one declaration here, one line in `REGISTRY`, one folder of `csrc/kernels`.
"""

from __future__ import annotations

from autofa.kernels.cpu_flash import CPU_FLASH
from autofa.kernels.registry import Candidate, Registry
from autofa.kernels.split_q import SPLIT_Q
from autofa.kernels.vendor import VENDORS

REGISTRY = Registry(families=(CPU_FLASH, SPLIT_Q), vendors=VENDORS)

__all__ = ["REGISTRY", "Candidate", "Registry"]
