"""Kernels of other libraries as candidates: what each serves, stated in the same terms as ours.

How each is called is known to csrc/runtime/vendor.cpp; here stand only names and domains: torch's
own, and what the declarations of other libraries (`vendors/`) have in common. `torch.sdpa`,
untouched, is the baseline of every ratio and the last rung of the ladder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from autofa.device import Limits
from autofa.kernels.family import Constraint, Domain, HeadDims
from autofa.problem import DTYPES, Problem

BASELINE = "torch.sdpa"


@cache
def _installed(library: str) -> str | None:
    # Reading a distribution's metadata costs 0.7 ms, and every stored row asks.
    try:
        return ".".join(metadata.version(library).split("+")[0].split(".")[:2])
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class VendorKernel:
    """A kernel that another library brings.

    Attributes:
        slug: its name everywhere, e.g. `torch.flash`.
        title: the customary form, e.g. `(sdpa flash)`.
        domains: what it serves, one domain per device kind.
        library: the distribution it comes with, whose major.minor keeps its rows valid.
        rounds: dtypes in which it rounds scores or weights before it sums them, which makes it of
            the accuracy class "fast".
        plans: whether it plans each shape for long (cuDNN on an H200: 50 to 700 ms), so that a tune
            tries it on odd inputs only where it wins.
        about: one line for people.
    """

    slug: str
    title: str
    domains: tuple[Domain, ...]
    library: str = "torch"
    rounds: tuple[str, ...] = ()
    plans: bool = False
    about: str = ""

    @property
    def family_name(self) -> str:
        return self.slug

    @property
    def returns_lse(self) -> bool:
        """Whether a call can have its log-sum-exp; torch's backends keep theirs to themselves."""
        return self.library != "torch"

    def refusal(self, problem: Problem, limits: Limits) -> str | None:
        """Why it may not serve `problem` there; None if it may."""
        reasons = [d.refusal(problem, limits) for d in self.domains]
        if None in reasons:
            return None
        here = [r for d, r in zip(self.domains, reasons, strict=True) if d.device == limits.kind]
        return here[0] if here else reasons[0]

    def version(self) -> str | None:
        """major.minor of the installed library; None where it is not installed."""
        return _installed(self.library)

    def not_here(self, machine: Iterable[Limits]) -> str | None:
        """Why it serves nothing on a machine with these devices; None if it may serve something.

        Whether an installed library can be loaded shows only when it is loaded.
        """
        if self.version() is None:
            return f"{self.library} is not installed"
        reasons = {domain.device: f"runs on {domain.device} only" for domain in self.domains}
        for limits in machine:
            for domain in self.domains:
                if domain.device == limits.kind:
                    reason = domain.arch_refusal(limits)
                    if reason is None:
                        return None
                    reasons[limits.kind] = reason
        return "; ".join(reasons.values())

    def accuracy(self, dtype: str) -> str:
        """Its accuracy class in that dtype: `f32`, or `fast`, which users must ask for."""
        return "fast" if dtype in self.rounds else "f32"

    def deterministic(self, device: str) -> bool:
        """Whether the forward gives the same bits for the same input there."""
        return all(d.deterministic for d in self.domains if d.device == device)

    def __str__(self) -> str:
        return self.slug


# Rules that several libraries share.
UPPER_LEFT_SQUARE = Constraint(
    "causal corner",
    "its causal corner is the lower-right one: seqlen_q != seqlen_k needs causal_lower_right",
    lambda _, p, __: p.mask != "causal" or p.seqlen_q == p.seqlen_k,
)
NO_EMPTY_ROWS = Constraint(
    "empty rows",
    "causal needs seqlen_q <= seqlen_k",
    lambda _, p, __: not p.causal or p.seqlen_q <= p.seqlen_k,
)
GRID = Constraint(
    "grid",
    "batch and heads must each be at most 65535, the CUDA grid's limit",
    lambda _, p, __: max(p.batch, p.heads_q) <= 65535,
)

_HALF = ("f16", "bf16")

# Measured on CPU with torch 2.13: the flash op is what SDPA picks wherever its rules allow it.
_CPU_FLASH = Domain("cpu", DTYPES, unequal_head_dims=False)
_ANY_CPU = Domain("cpu", DTYPES)
_ANY_CUDA = Domain("cuda", DTYPES)

SDPA = VendorKernel(
    BASELINE,
    "(sdpa)",
    (_ANY_CPU, _ANY_CUDA),
    plans=True,
    about="torch's scaled_dot_product_attention, which picks a backend by itself",
)
FLASH = VendorKernel(
    "torch.flash",
    "(sdpa flash)",
    (
        _CPU_FLASH,
        Domain(
            "cuda",
            _HALF,
            HeadDims(step=1, last=256),
            masks=("none", "causal"),
            min_arch=80,
            unequal_causal=False,
            unequal_head_dims=False,
        ),
    ),
    about="the FlashAttention-2 backend of SDPA; on CPU its flash kernel",
)
EFFICIENT = VendorKernel(
    "torch.efficient",
    "(sdpa efficient)",
    (
        Domain(
            "cuda",
            DTYPES,
            masks=("none", "causal"),
            min_arch=50,
            extra=(
                Constraint(
                    "alignment",
                    "head dims must be multiples of 8 (4 in f32)",
                    lambda _, p, __: (
                        p.head_dim % (4 if p.dtype == "f32" else 8) == 0
                        and p.head_dim_v % (4 if p.dtype == "f32" else 8) == 0
                    ),
                ),
            ),
        ),
    ),
    about="the memory-efficient backend of SDPA",
)
CUDNN = VendorKernel(
    "torch.cudnn",
    "(sdpa cudnn)",
    (
        Domain(
            "cuda",
            _HALF,
            HeadDims(step=8, first=8, last=256),
            masks=("none", "causal"),
            min_arch=80,
            unequal_causal=False,
            unequal_head_dims=False,
            extra=(
                Constraint(
                    "head dim",
                    "above 128 only on sm_90 and sm_100",
                    lambda _, p, limits: p.head_dim <= 128 or limits.capability in (90, 100, 103),
                ),
            ),
        ),
    ),
    plans=True,
    about="the cuDNN backend of SDPA",
)
UNFUSED = VendorKernel(
    "torch.unfused",
    "(unfused)",
    (
        Domain("cpu", DTYPES, masks=("none", "causal"), unequal_causal=False),
        Domain("cuda", DTYPES, masks=("none", "causal"), unequal_causal=False),
    ),
    rounds=_HALF,
    about="matmul, softmax, matmul: what attention costs without fusion",
)

# Those that come with torch itself.
VENDORS = (SDPA, FLASH, EFFICIENT, CUDNN, UNFUSED)
