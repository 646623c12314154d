"""The stub that instantiates one variant. Generated on every build, never committed."""

from __future__ import annotations

from autofa.kernels.family import Variant
from autofa.problem import Problem
from autofa.resources import csrc_dir

# sizeof(autofa_params) of csrc/include/autofa/abi.h; every stub asserts it.
PARAMS_BYTES = 272

_CAUSAL = {"causal": "AUTOFA_CAUSAL_UPPER_LEFT", "causal_lower_right": "AUTOFA_CAUSAL_LOWER_RIGHT"}
_MASK = {"bool": "AUTOFA_MASK_BOOL", "additive": "AUTOFA_MASK_ADDITIVE"}


def _smallest_problem(variant: Variant) -> Problem:
    """A problem of the variant's kind, to evaluate the family's size formulas with."""
    domain = variant.family.domain
    head_dim = variant.head_dim or 1
    return Problem(
        variant.dtype or domain.dtypes[0],
        *(1, 1, 1, 1, 1),
        head_dim,
        head_dim,
        variant.mask or domain.masks[0],
        domain.device,
    )


def _constants(variant: Variant) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if variant.dtype is not None:
        found.append(("dtype", f"AUTOFA_{variant.dtype.upper()}"))
    if variant.head_dim is not None:
        found.append(("head_dim", str(variant.head_dim)))
    if variant.mask is not None:
        found.append(("causal", _CAUSAL.get(variant.mask, "AUTOFA_CAUSAL_NONE")))
        found.append(("mask", _MASK.get(variant.mask, "AUTOFA_MASK_NONE")))
    for param, value in zip(variant.family.params, variant.values, strict=True):
        text = f"AUTOFA_{value.upper()}" if isinstance(value, str) else str(value)
        found.append((param.name, text))
    return found


def static_smem_bytes(variant: Variant) -> int:
    """Dynamic shared memory of one block as the declaration predicts it; 0 on CPU."""
    return variant.family.smem_bytes(variant.params, _smallest_problem(variant))


def stub(variant: Variant) -> str:
    """The source text of one variant: parameters by name, and what the declaration predicts.

    The `static_assert`s make a kernel that has drifted from its declaration fail to compile.
    """
    family = variant.family
    threads = family.threads(variant.params, _smallest_problem(variant))
    constants = "\n".join(
        f"  static constexpr int {name} = {value};" for name, value in _constants(variant)
    )
    return f"""// Generated from the declaration of {family.name}.
#include "autofa/export.h"
#include "kernels/{family.folder}/{family.entry}"

struct Params {{
{constants}
}};
using Variant = autofa::{family.folder}::Kernel<Params>;
static_assert(Variant::threads == {threads}, "threads: not what the declaration says");
static_assert(Variant::smem_bytes == {static_smem_bytes(variant)},
              "shared memory: not what the declaration says");
static_assert(sizeof(autofa_params) == {PARAMS_BYTES}, "autofa_params: not what Python mirrors");
AUTOFA_EXPORT_VARIANT(Variant)
"""


def identity(slug: str, fingerprint: str, target: str, compiler: str) -> str:
    """The lines put before the stub: what the library says of itself. Not part of its key."""

    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    values = {"SLUG": slug, "FINGERPRINT": fingerprint, "TARGET": target, "COMPILER": compiler}
    return "".join(f"#define AUTOFA_{name} {quoted(text)}\n" for name, text in values.items())


def include_roots(variant: Variant) -> tuple[str, str]:
    """The folders that the stub's includes are relative to."""
    root = (variant.family.root or csrc_dir()).absolute()
    return str(root), str(root / "include")
