"""What the tests of CUDA families share: variants on the CPU emulator, cases, and the reference.

A case lies in buffers of NaN, so that a read past the tail or between the rows shows; the output is
NaN before the call, and so is all around it afterwards. Explicit masks too lie among NaNs, or among
`True` where they are boolean.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from autofa import compiler, settings
from autofa.compiler.render import identity, stub
from autofa.device import Limits
from autofa.kernels.family import KernelFamily, Variant
from autofa.problem import EXPLICIT_MASKS, Problem
from autofa.resources import csrc_dir
from autofa.runtime import abi

EMULATOR = Path(__file__).parent / "cuda_emulator"
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16}
_TIMES_FAST = 16
_GUARD = 64  # floats after a workspace


@dataclass(frozen=True)
class Case:
    """One call: sizes, where rows lie (`bhnd`, `bnhd`, `gaps`), and what is odd about it.

    `mask_dims` names the dims that an explicit mask has; it is broadcast along the others.
    """

    name: str
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    layout: str = "bhnd"
    scale: float = 0.125
    batch: int = 1
    spoiled: bool = False  # infinities and NaNs among the last keys and values
    growing: bool = False  # scores that grow along the keys, so that rows are rescaled often
    mask_dims: str = "bhqk"
    mask_dtype: str = "f32"  # of an additive mask; "own" is the query's
    head_dim_v: int | None = None  # None is that of queries and keys


CASES = (
    Case("one key", 1, 1, 1, 1),
    Case("whole tiles", 2, 2, 128, 128),
    Case("ragged", 2, 2, 150, 77, layout="bnhd", batch=2, mask_dims="bk"),
    Case("more keys", 2, 1, 40, 210, layout="gaps", mask_dtype="own"),
    Case("more queries", 4, 2, 210, 40, mask_dims="q"),
    Case("no keys", 1, 1, 70, 0),
    Case("negative scale", 1, 1, 70, 150, scale=-1.5, mask_dims="qk"),
    Case("zero scale", 1, 1, 70, 150, scale=0.0, mask_dims="hqk", mask_dtype="own"),
    Case("growing scores", 1, 1, 33, 300, growing=True),
    Case("spoiled values", 2, 1, 130, 170, spoiled=True),
)


@dataclass(frozen=True)
class Kind:
    """What a variant is specialised for."""

    dtype: str
    mask: str
    head_dim: int


def _by_news(seen: set[tuple[str, object]], variant: Variant) -> tuple[int, int]:
    values = set(vars(variant.params).items())
    return -len(values - seen), variant.params.block_m * variant.params.block_n


def long_problem(family: KernelFamily, kind: Kind, limits: Limits) -> Problem | None:
    """Of a thousand queries, or as few as the family serves; None if it serves neither."""
    for heads_q, rows in ((8, 999), (32, 16)):
        sizes = (1, heads_q, 8, rows, 999, kind.head_dim, kind.head_dim)
        problem = Problem(kind.dtype, *sizes, kind.mask)
        if family.domain.refusal(problem, limits) is None:
            return problem
    return None


def cover(family: KernelFamily, kinds: Sequence[Kind], limits: Limits) -> list[Variant]:
    """A legal variant for each kind that the family serves there, chosen so that together they have
    as many of the parameters' values as can be; of equals, the one with the least work per block.
    """
    found: list[Variant] = []
    seen: set[tuple[str, object]] = set()
    for kind in kinds:
        problem = long_problem(family, kind, limits)
        if problem is None:
            continue
        best = min(family.legal(problem, limits), key=partial(_by_news, seen))
        seen |= set(vars(best.params).items())
        found.append(best)
    return found


def emulated(variant: Variant, folder: Path) -> ctypes.CDLL:
    """The variant compiled for the emulator."""
    root = variant.family.root or csrc_dir()
    source, library = folder / f"{variant.slug}.cpp", folder / f"{variant.slug}.so"
    memory = f"EMULATE_SHARED_MEMORY(autofa::{variant.family.folder})\n"
    source.write_text(identity(variant.slug, "", "emulator", "") + stub(variant) + memory)
    command = compiler.find("cpu", settings.load()).command
    flags = ("-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
    includes = [f"-I{place}" for place in (EMULATOR, root, root / "include")]
    subprocess.run([*command, *flags, *includes, str(source), "-o", str(library)], check=True)
    return load(library)


def load(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library))


def _strides(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * 3)(*tensor.stride()[:3])


def _workspace(library: ctypes.CDLL, params: abi.Params, device: torch.device) -> torch.Tensor:
    """What the call asks for, and a guard after it, all NaN."""
    size = library.autofa_workspace_bytes
    size.argtypes, size.restype = (ctypes.c_void_p,), ctypes.c_int64
    floats = math.ceil(size(ctypes.addressof(params)) / 4) + _GUARD
    return torch.full((floats,), math.nan, device=device)


def launch(
    library: ctypes.CDLL,
    mask: str,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    lse: torch.Tensor | None = None,
    scale: float = 0.125,
    attn_mask: torch.Tensor | None = None,
) -> int:
    """Calls `autofa_launch` on query, key, value and output; what it returned.

    `attn_mask` is already expanded to (B, H, Nq, Nk), with strides of 0.
    """
    q, k, v, out = tensors
    dtype = next(name for name, known in TORCH.items() if known == q.dtype)
    params = abi.Params(
        struct_bytes=ctypes.sizeof(abi.Params),
        dtype=abi.DTYPE_CODES[dtype],
        causal=abi.CAUSAL_CODES.get(mask, 0),
        mask=abi.MASK_CODES.get(mask, 0),
        device_index=q.device.index if q.is_cuda else -1,
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr() if lse is not None else None,
        batch=q.shape[0],
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        seqlen_q=q.shape[2],
        seqlen_k=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        q_strides=_strides(q),
        k_strides=_strides(k),
        v_strides=_strides(v),
        out_strides=_strides(out),
        scale=scale,
    )
    if attn_mask is not None:
        params.attn_mask = attn_mask.data_ptr()
        params.mask_strides = (ctypes.c_int64 * 4)(*attn_mask.stride())
        if mask == "additive":
            params.mask_dtype = 0 if attn_mask.dtype == torch.float32 else abi.DTYPE_CODES[dtype]
    scratch = _workspace(library, params, q.device)
    params.workspace = scratch.data_ptr() if scratch.numel() > _GUARD else None
    stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else None
    call = library.autofa_launch
    call.argtypes = (ctypes.c_void_p,) * 3
    code = int(call(ctypes.addressof(params), ctypes.addressof(abi.Executor()), stream))
    if q.is_cuda:
        torch.cuda.synchronize()
    assert scratch[-_GUARD:].isnan().all()
    return code


def _in_nan(
    shape: tuple[int, int, int, int], layout: str, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """A buffer of NaN, and the function that views the tensor of `shape` in one like it."""
    batch, heads, rows, dim = shape
    views: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
        "bhnd": ((batch, heads, rows + 64, dim), lambda b: b[:, :, :rows]),
        "bnhd": ((batch, rows + 64, heads, dim), lambda b: b[:, :rows].transpose(1, 2)),
        "gaps": ((batch, heads, rows + 64, dim + 24), lambda b: b[:, :, :rows, 8 : 8 + dim]),
    }
    size, view = views[layout]
    return torch.full(size, math.nan, dtype=dtype, device=device), view


def _explicit_mask(case: Case, kind: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A random mask as `launch` takes it; some rows see nothing, and no row sees the last 9 keys
    of a spoiled case."""
    sizes = dict(zip("bhqk", (case.batch, case.heads_q, case.seqlen_q, case.seqlen_k), strict=True))
    shape = [sizes[dim] if dim in case.mask_dims else 1 for dim in "bhqk"]
    visible = torch.rand(shape, device=device) < 0.7
    if shape[2] > 1:
        visible[:, :, 5::16] = False
    if case.spoiled:
        visible[..., -9:] = False
    shift = torch.randn(shape, device=device).masked_fill(~visible, -math.inf)
    kept = {"f32": torch.float32, "own": dtype}[case.mask_dtype]
    values = visible if kind == "bool" else shift.to(kept)
    around = torch.full(
        [*shape[:2], shape[2] + 3, shape[3] + 5],
        True if kind == "bool" else math.nan,
        dtype=values.dtype,
        device=device,
    )
    inside = around[:, :, : shape[2], 1 : 1 + shape[3]]
    inside.copy_(values)
    return inside.expand(tuple(sizes.values()))


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: str,
    scale: float,
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in float64; what a row does not see adds nothing, NaN included."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    rows, keys = q.shape[2], k.shape[2]
    shift = {"causal": 0, "causal_lower_right": keys - rows}.get(mask, keys)
    where = torch.arange(keys, device=q.device)[None] - torch.arange(rows, device=q.device)[:, None]
    scores = q.double() @ k.mT * scale
    hidden = where > shift
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = ~attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.double()
        hidden = attn_mask == -math.inf
    scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, -1) if keys else scores.new_full(q.shape[:3], -math.inf)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    spoiled = (weights > 0).double() @ (~v.isfinite()).double() > 0
    out = weights @ torch.nan_to_num(v, nan=0.0, posinf=0.0, neginf=0.0)
    return out.masked_fill(spoiled, math.nan), lse


def check(library: ctypes.CDLL, variant: Variant, case: Case, device: str = "cpu") -> None:
    """Runs one case of the variant and compares everything that it wrote, and did not write."""
    assert variant.dtype is not None
    assert variant.head_dim is not None
    assert variant.mask is not None
    dtype = TORCH[variant.dtype]
    torch.manual_seed(len(case.name))
    q_shape = (case.batch, case.heads_q, case.seqlen_q, variant.head_dim)
    k_shape = (case.batch, case.heads_kv, case.seqlen_k, variant.head_dim)
    v_shape = (*k_shape[:3], case.head_dim_v or variant.head_dim)
    inputs = []
    for shape in (q_shape, k_shape, v_shape):
        buffer, view = _in_nan(shape, case.layout, dtype, device)
        view(buffer).copy_(torch.randn(shape))
        inputs.append(view(buffer))
    q, k, v = inputs
    if case.growing:
        k *= torch.linspace(0.1, 20, case.seqlen_k, dtype=dtype, device=device)[:, None]
    if case.spoiled:
        v[:, :, case.seqlen_k // 2, 5] = math.inf
        v[:, :, case.seqlen_k * 2 // 3 :, ::3] = math.nan
        if variant.mask != "none":  # without a mask, every row would be NaN
            k[:, :, -9:] = math.nan
    explicit = variant.mask in EXPLICIT_MASKS
    attn_mask = _explicit_mask(case, variant.mask, dtype, device) if explicit else None
    buffer, view = _in_nan((*q_shape[:3], v_shape[3]), case.layout, dtype, device)
    lse = torch.full(q_shape[:3], math.nan, device=device)

    tensors = (q, k, v, view(buffer))
    assert launch(library, variant.mask, tensors, lse, case.scale, attn_mask) == abi.OK

    out = view(buffer).double()
    want, want_lse = reference(q, k, v, variant.mask, case.scale, attn_mask)
    assert torch.equal(out.isfinite(), want.isfinite())
    # One rounding of the weights and one of the output, each half a unit in the last place.
    unit = 2.0 ** -(10 if variant.dtype == "f16" else 7)
    close = 2e-5
    if variant.accuracy(variant.dtype) == "fast":
        # Sums in 16 bits add one rounding per addend, and scores have the fewer bits after the
        # point, the larger they are: of which weights are the exponentials.
        top = torch.nan_to_num(want_lse, neginf=0.0).abs().amax().item() if out.numel() else 0.0
        unit *= _TIMES_FAST * max(1.0, top / 16)
        close = _TIMES_FAST * 2.0**-11 * max(1.0, top)
    largest = torch.nan_to_num(want).abs().amax().item() if want.numel() else 0.0
    error = torch.nan_to_num(out - want, nan=0.0, posinf=0.0, neginf=0.0).abs().amax().item()
    assert error <= unit * max(largest, 0.25)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-5, atol=close, equal_nan=True)
    view(buffer).fill_(0)
    assert buffer.isnan().sum() == buffer.numel() - out.numel()


def named(family: KernelFamily, text: str, limits: Limits) -> Variant:
    """The variant of a slug less its family's name, which must be legal for a long problem of its
    own head dims."""
    found = family.parse(f"{family.name}-{text}")
    assert found is not None
    assert found.dtype is not None
    assert found.head_dim is not None
    assert found.mask is not None
    dims = (found.head_dim, found.params.columns_v)
    problem = Problem(found.dtype, 4, 8, 8, 4096, 4096, *dims, found.mask)
    assert found.refusal(problem, limits) is None
    return found


def check_emulated(variant: Variant, folder: Path, *cases: Case) -> None:
    """Runs it on the emulator, case by case."""
    library = emulated(variant, folder)
    for case in cases:
        check(library, variant, case)
