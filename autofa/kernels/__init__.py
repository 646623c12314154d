"""The candidates: own kernel families and vendor kernels, as data.

Adding a family: one declaration in `families/`, one folder of `csrc/kernels`.
"""

from __future__ import annotations

from autofa.kernels.families import declared
from autofa.kernels.registry import Candidate, Registry
from autofa.kernels.vendor import VENDORS

REGISTRY = Registry(families=declared(), vendors=VENDORS)

__all__ = ["REGISTRY", "Candidate", "Registry"]
