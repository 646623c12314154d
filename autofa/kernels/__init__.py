"""The candidates: own kernel families and vendor kernels, as data.

Adding a family: one declaration here, one line in `REGISTRY`, one folder of `csrc/kernels`.
"""

from __future__ import annotations

from autofa.kernels.registry import Candidate, Registry
from autofa.kernels.vendor import VENDORS

REGISTRY = Registry(families=(), vendors=VENDORS)

__all__ = ["REGISTRY", "Candidate", "Registry"]
