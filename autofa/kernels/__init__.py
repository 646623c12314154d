"""The candidates: own kernel families and vendor kernels, as data.

Adding a family: one declaration in `families/`, one folder of `csrc/kernels`. Adding a library:
one declaration in `vendors/`, one adapter in `autofa/runtime/vendors/`, a row in vendor.cpp.
"""

from __future__ import annotations

from autofa.kernels.families import declared
from autofa.kernels.registry import Candidate, Registry
from autofa.kernels.vendor import VENDORS
from autofa.kernels.vendors import declared as declared_vendors

REGISTRY = Registry(families=declared(), vendors=(*VENDORS, *declared_vendors()))

__all__ = ["REGISTRY", "Candidate", "Registry"]
