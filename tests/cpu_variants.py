"""What the tests of CPU families share: variants called through the C ABI, cases, a reference.

Inputs are contiguous, or rows of (B, N, H, D) with an offset and gaps; explicit masks lie among
values that a read outside the mask would betray. The output holds NaN before the call.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch

from autofa import compiler, settings
from autofa.device import Limits, cpu_info, cpu_limits, named_limits
from autofa.kernels import REGISTRY
from autofa.kernels.family import KernelFamily, Variant
from autofa.problem import EXPLICIT_MASKS, Problem
from autofa.runtime import abi

TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Half a unit in the last place, relative; f32 results are compared absolutely.
ROUNDING = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}
# Families that round weights to 16 bits may use an exp that is no better.
_LSE_16_BITS = 3e-4
RANGE_FN = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
PARALLEL_FOR = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, RANGE_FN, ctypes.c_void_p
)
NO_THREADS = PARALLEL_FOR(0)
_ALIGNMENT = 256  # of a workspace

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        mask_dims: the dims that an explicit mask has; it is broadcast along the others.
        mask_dtype: of an additive mask: `f32`, or the query's `own`.
    """

    nq: int
    nk: int
    d: int = 24
    dv: int = 24
    hq: int = 2
    hkv: int = 2
    batch: int = 2
    scale: float | None = None
    mask_dims: str = "bhqk"
    mask_dtype: str = "f32"

    def problem(self, dtype: str, mask: str) -> Problem:
        heads = (self.batch, self.hq, self.hkv)
        return Problem(dtype, *heads, self.nq, self.nk, self.d, self.dv, mask, "cpu")


def machines() -> list[Limits]:
    """Each instruction set that this CPU has, the plain ones and its own with all extras."""
    level = cpu_info().level
    plain = [named_limits(f"x86-64-v{v}") for v in (3, 4) if v < level]
    return [*plain, cpu_limits()] if level else []


def samples(family: KernelFamily) -> list[tuple[Variant, Limits]]:
    """For each instruction set, the default in the family's first dtype; and for each dtype and
    mask that is compiled in, the legal variant with the most parameter values not seen before."""
    found: dict[str, tuple[Variant, Limits]] = {}
    seen: set[tuple[str, object]] = set()
    masks = family.domain.masks if "mask" in family.specialised else ("none",)
    for limits in machines():
        for dtype, mask in itertools.product(family.domain.dtypes, masks):
            legal = family.legal(Case(4, 300, 64, 64).problem(dtype, mask), limits)
            if not legal:
                continue
            chosen = [max(legal, key=lambda v: len(set(vars(v.params).items()) - seen))]
            if (dtype, mask) == (family.domain.dtypes[0], masks[0]):
                chosen.insert(0, legal[0])
            for variant in chosen:
                found.setdefault(variant.slug, (variant, limits))
                seen |= set(vars(variant.params).items())
    return list(found.values())


def torch_threads() -> PARALLEL_FOR:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return ctypes.cast(library.torch_parallel_for, PARALLEL_FOR)


class Library:
    """One variant, compiled, loaded and called as abi.h says."""

    def __init__(self, variant: Variant, limits: Limits) -> None:
        (built,) = compiler.build([(variant, variant.target(limits))], settings.load())
        assert built.library is not None, built.message
        assert variant.dtype is not None
        self.variant = variant
        self.limits = limits
        self.dtype = variant.dtype
        self.torch_dtype = TORCH[self.dtype]
        library = ctypes.CDLL(str(built.library))
        self.launch = library.autofa_launch
        self.launch.argtypes = (ctypes.c_void_p,) * 3
        self.workspace_bytes = library.autofa_workspace_bytes
        self.workspace_bytes.argtypes = (ctypes.c_void_p,)
        self.workspace_bytes.restype = ctypes.c_int64

    def serves(self, case: Case, mask: str) -> bool:
        return self.variant.refusal(case.problem(self.dtype, mask), self.limits) is None

    def params(
        self,
        tensors: Tensors,
        out: torch.Tensor,
        *,
        mask: str = "none",
        scale: float | None = None,
        attn_mask: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> abi.Params:
        """The record of a call; `attn_mask` is expanded to (B, H, Nq, Nk), with strides of 0."""
        q, k, v = tensors
        p = abi.Params(ctypes.sizeof(abi.Params), abi.DTYPE_CODES[self.dtype])
        p.causal = abi.CAUSAL_CODES.get(mask, 0)
        p.device_index = -1
        p.q, p.k, p.v, p.out = (t.data_ptr() for t in (q, k, v, out))
        p.lse = None if lse is None else lse.data_ptr()
        p.batch, p.heads_q, p.seqlen_q, p.head_dim = q.shape
        _, p.heads_kv, p.seqlen_k, p.head_dim_v = v.shape
        for strides, tensor in zip(
            (p.q_strides, p.k_strides, p.v_strides, p.out_strides), (q, k, v, out), strict=True
        ):
            strides[:] = tensor.stride()[:3]
        if attn_mask is not None:
            p.attn_mask = attn_mask.data_ptr()
            p.mask_strides[:] = attn_mask.stride()
            p.mask = abi.MASK_CODES["additive"]
            if attn_mask.dtype == torch.bool:
                p.mask = abi.MASK_CODES["bool"]
            elif attn_mask.dtype != torch.float32:
                p.mask_dtype = abi.DTYPE_CODES[self.dtype]
        p.scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        return p

    def call(
        self, params: abi.Params, parallel_for: PARALLEL_FOR = NO_THREADS, threads: int = 1
    ) -> int:
        """Runs it in a workspace that holds no zeros; what it returned."""
        size = self.workspace_bytes(ctypes.addressof(params))
        workspace = torch.full((size + 2 * _ALIGNMENT,), 0xA5, dtype=torch.uint8)
        start = -workspace.data_ptr() % _ALIGNMENT
        params.workspace = workspace.data_ptr() + start if size else None
        executor = abi.Executor(ctypes.cast(parallel_for, ctypes.c_void_p), threads)
        code = int(self.launch(ctypes.addressof(params), ctypes.addressof(executor), None))
        assert (workspace[:start] == 0xA5).all()
        assert (workspace[start + size :] == 0xA5).all()
        return code

    def attend(self, tensors: Tensors, threads: int = 1, **options: object) -> torch.Tensor:
        """The output, in a tensor that held NaN before."""
        q, _, v = tensors
        out = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=self.torch_dtype)
        params = self.params(tensors, out, **options)  # type: ignore[arg-type]
        assert self.call(params, torch_threads() if threads > 1 else NO_THREADS, threads) == abi.OK
        return out


def families() -> list[KernelFamily]:
    return [f for f in REGISTRY.families if f.domain.device == "cpu"]


def _tensor(library: Library, rng: random.Random, *shape: int) -> torch.Tensor:
    batch, heads, length, dim = shape
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    if rng.random() < 0.5:
        return torch.randn(shape, generator=generator).to(library.torch_dtype)
    wide = torch.randn(batch, length, heads, dim + 3, generator=generator).to(library.torch_dtype)
    return wide[..., 1 : dim + 1].transpose(1, 2)


def qkv(library: Library, rng: random.Random, case: Case) -> Tensors:
    return (
        _tensor(library, rng, case.batch, case.hq, case.nq, case.d),
        _tensor(library, rng, case.batch, case.hkv, case.nk, case.d),
        _tensor(library, rng, case.batch, case.hkv, case.nk, case.dv),
    )


def explicit_mask(library: Library, rng: random.Random, case: Case, mask: str) -> torch.Tensor:
    """A random mask as `Library.params` takes it. Some rows see nothing, and some blocks of keys
    are seen by none; about every third mask lies transposed in memory."""
    sizes = dict(zip("bhqk", (case.batch, case.hq, case.nq, case.nk), strict=True))
    shape = [sizes[dim] if dim in case.mask_dims else 1 for dim in "bhqk"]
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    visible = torch.rand(shape, generator=generator) < 0.7
    if shape[2] > 1:
        visible[:, :, 1::7] = False
    if shape[3] > 64:
        visible[..., 16:48] = False
    shift = torch.randn(shape, generator=generator).masked_fill(~visible, -math.inf)
    kept = torch.float32 if case.mask_dtype == "f32" else library.torch_dtype
    values = visible if mask == "bool" else shift.to(kept)
    room = (shape[0], shape[1], shape[2] + 3, shape[3] + 5)
    around = True if mask == "bool" else math.nan
    if rng.random() < 0.3:
        wide = torch.full((*room[:2], room[3], room[2]), around, dtype=values.dtype).mT
    else:
        wide = torch.full(room, around, dtype=values.dtype)
    inside = wide[:, :, 1 : 1 + shape[2], 2 : 2 + shape[3]]
    inside.copy_(values)
    return inside.expand(tuple(sizes.values()))


def reference(
    tensors: Tensors,
    mask: str = "none",
    scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, log-sum-exp, and the output of |V|, in float64. What a row does not see adds nothing,
    NaN included."""
    q, k, v = tensors
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = q.double() @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    nq, nk = scores.shape[-2:]
    hidden = torch.zeros(nq, nk, dtype=torch.bool)
    if mask in ("causal", "causal_lower_right"):
        hidden = ~hidden.logical_not().tril(nk - nq if mask == "causal_lower_right" else 0)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = hidden | ~attn_mask
    elif attn_mask is not None:
        hidden = hidden | (attn_mask == -math.inf)
        scores = scores + attn_mask.double()
    hidden = hidden.expand(scores.shape)
    scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.clamp(min=-1e300).unsqueeze(-1))
    spoiled = (~hidden).double() @ (~v.isfinite()).double() > 0
    finite = torch.nan_to_num(v, nan=0.0, posinf=0.0, neginf=0.0)
    return (weights @ finite).masked_fill(spoiled, math.nan), lse, weights @ finite.abs()


def assert_close(
    library: Library,
    out: torch.Tensor,
    right: torch.Tensor,
    magnitude: torch.Tensor | None = None,
    atol: float = 2e-5,
) -> None:
    """Within one rounding of the output and `atol`, and one rounding of every weight where the
    output of |V| is given."""
    unit = ROUNDING[library.dtype]
    allowed = atol + 1.01 * unit * right.abs()
    if magnitude is not None:
        allowed = allowed + 1.01 * unit * magnitude
    wrong = ~((out.double() - right).abs() <= allowed) & ~(out.isnan() & right.isnan())
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        count = int(wrong.sum())
        got, want = float(out[place]), float(right[place])
        raise AssertionError(f"{count} of {out.numel()} wrong, at {place}: {got} not {want}")


def check(
    library: Library,
    rng: random.Random,
    case: Case,
    mask: str = "none",
    *,
    threads: int = 1,
    exact_weights: bool = False,
) -> bool:
    """Runs one case and compares output and log-sum-exp; False if the variant does not serve it.

    With `exact_weights` it is held to a single rounding, that of the output.
    """
    if not library.serves(case, mask):
        return False
    tensors = qkv(library, rng, case)
    attn_mask = explicit_mask(library, rng, case, mask) if mask in EXPLICIT_MASKS else None
    options = {"mask": mask, "scale": case.scale, "attn_mask": attn_mask}
    lse = torch.full(tensors[0].shape[:3], math.nan)
    out = library.attend(tensors, threads, lse=lse, **options)
    right, right_lse, magnitude = reference(tensors, **options)  # type: ignore[arg-type]
    assert_close(library, out, right, None if exact_weights else magnitude)
    close = 1e-5 if exact_weights or library.dtype == "f32" else _LSE_16_BITS
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=close)
    return True
