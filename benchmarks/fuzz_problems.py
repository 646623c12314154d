"""Random calls of attention as data: drawn from a seed, written as JSON, made into tensors.

Every tensor lies in a larger buffer of NaN (masks: NaN or True), so that what a kernel reads beside
it comes out. Values depend on the problem's own seed alone.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from autofa.bench.exact import Call

TORCH = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
}
LAYOUTS = (
    "dense", "permuted", "padded", "stepped", "wide", "columns", "expanded", "overlapping",
)  # fmt: skip
# Each element has memory of its own, so that a single one can be spoiled.
_OWN_MEMORY = ("dense", "permuted", "padded", "stepped", "wide", "columns")
LOOKS = ("random", "lengths", "window", "blocks", "rows", "nothing", "lowest")
_LENGTHS = (
    1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 96, 100, 127, 128,
    129, 150, 200, 255, 256, 257, 300, 400, 511, 513, 800, 1025, 2049,
)  # fmt: skip
_HEAD_DIMS = (
    1, 2, 3, 5, 8, 8, 16, 16, 20, 24, 32, 32, 40, 64, 64, 64, 72, 80, 96, 104, 128, 128, 160, 192,
    256, 264, 320, 512, 520,
)  # fmt: skip
_SCALES = (0.0, -0.5, -3.0, 1e-30, 1e-4, 1.0, 50.0, 1e4)
_GROUPS = (2, 3, 4, 5, 8, 16, 32)
_OFFSETS = (0, 0, 0, 8, 4, 2, 1, 3, 7)
_GUARD = 1024  # elements before and after
# Elements of the score matrix and of one tensor: half a millisecond of float64 on one core.
_MOST = {"cpu": (3_000, 10_000, 50_000), "cuda": (20_000, 100_000, 1_000_000)}


@dataclass(frozen=True)
class Spec:
    """One call.

    Attributes:
        q_lead, k_lead, v_lead: the leading sizes; dims that broadcast have 1 or are left out.
        mask: the shape of an explicit mask.
        mask_dtype: `bool`, `f32`, or `own`, the query's.
        look: which keys the mask hides (`LOOKS`).
        layouts, offsets: of query, key, value and mask; offsets in elements.
        poison: NaN (or an infinity) in keys and values: `hidden`, where no query sees them; `seen`,
            anywhere.
        logits: factor of the query's values.
    """

    dtype: str
    q_lead: tuple[int, ...]
    k_lead: tuple[int, ...]
    v_lead: tuple[int, ...]
    nq: int
    nk: int
    d: int
    dv: int
    gqa: bool = False
    causal: bool = False
    lower_right: bool = False
    mask: tuple[int, ...] | None = None
    mask_dtype: str = "bool"
    look: str = "random"
    scale: float | None = None
    layouts: tuple[str, str, str, str] = ("dense",) * 4
    offsets: tuple[int, int, int, int] = (0,) * 4
    poison: str = ""
    logits: float = 1.0
    seed: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Spec:
        fields = json.loads(text)
        return Spec(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def _leads(rng: random.Random, square: bool) -> tuple[tuple[int, ...], ...]:
    """Leading sizes of query, key and value, and whether heads are grouped (as 1 or 0)."""
    rank = 2 if square else rng.choice((0, 1, 1, 2, 2, 2, 2, 2, 2, 3))
    lead = tuple(rng.choice((1, 1, 2, 2, 3, 4)) for _ in range(rank))
    if rank and rng.random() < 0.02:
        place = rng.randrange(rank)
        lead = (*lead[:place], 0, *lead[place + 1 :])
    kind = rng.random()
    if rank and kind < 0.3:
        return (*lead[:-1], lead[-1] * rng.choice(_GROUPS)), lead, lead, (1,)
    if kind < 0.45 and not square:

        def part() -> tuple[int, ...]:
            kept = tuple(size if rng.random() < 0.6 else 1 for size in lead)
            return kept[rng.choice((0, 0, 1)) :]

        return part(), part(), part(), (0,)
    return lead, lead, lead, (0,)


def _fit(spec_sizes: tuple[int, int, int], heads: int, most: int) -> tuple[int, int, int]:
    """Lengths and batch-heads brought down to what a reference may cost."""
    nq, nk, width = spec_sizes
    while heads * nq * nk > most or heads * max(nq, nk) * width > 8 * most:
        if nq >= nk:
            nq = max(1, nq // 2 + nq % 2)
        else:
            nk = max(1, nk // 2 + nk % 2)
        if nq == nk == 1:
            break
    return nq, nk, width


def draw(rng: random.Random, device: str, head_dims: Sequence[int] = ()) -> Spec:
    """A problem; with `head_dims`, three of four are 4-D, half precision, and have one of those."""
    usual = bool(head_dims) and rng.random() < 0.75
    dtype = rng.choice(("f16", "bf16") if usual else ("f32",) * 5 + ("f16", "bf16") * 2 + ("f64",))
    q_lead, k_lead, v_lead, (gqa,) = _leads(rng, usual)
    d = dv = rng.choice(head_dims if usual else _HEAD_DIMS)
    if not usual and rng.random() < 0.3:
        dv = rng.choice(_HEAD_DIMS)
    nq, nk = rng.choice(_LENGTHS), rng.choice(_LENGTHS)
    if rng.random() < 0.3:
        nk = nq
    heads = math.prod(torch.broadcast_shapes(q_lead, () if gqa else k_lead, () if gqa else v_lead))
    nq, nk, _ = _fit((nq, nk, max(d, dv)), heads, rng.choice(_MOST[device]))
    if rng.random() < 0.03:
        nq, nk, d, dv = (
            0 if rng.random() < 0.4 else size for size in (nq, nk, d, dv)
        )  # fmt: skip
    lower_right = rng.random() < 0.1
    causal = lower_right or rng.random() < 0.35
    mask = None
    if not lower_right and rng.random() < 0.45:
        broadcast = torch.broadcast_shapes(q_lead, *(() if gqa else (k_lead, v_lead)))
        full = (*broadcast, nq, nk)
        kept = tuple(size if rng.random() < 0.6 else 1 for size in full)
        mask = kept[rng.randint(0, max(0, len(full) - 2)) :]
    kinds = LAYOUTS if not usual else (*("dense", "permuted", "padded") * 4, *LAYOUTS)
    layouts = tuple(rng.choice(kinds) if rng.random() < 0.6 else "dense" for _ in range(4))
    if layouts[3] == "overlapping":
        layouts = (*layouts[:3], "expanded")
    offsets = tuple(rng.choice(_OFFSETS) if rng.random() < 0.5 else 0 for _ in range(4))
    poison = ""
    if all(layout in _OWN_MEMORY for layout in layouts[1:3]):
        poison = rng.choice(("", "", "", "hidden", "hidden", "seen"))
    return Spec(
        dtype, q_lead, k_lead, v_lead, nq, nk, d, dv,
        bool(gqa), causal, lower_right, mask,
        rng.choice(("bool", "f32", "own")),
        rng.choice(LOOKS),
        rng.choice(_SCALES) if rng.random() < 0.25 else None,
        layouts, offsets, poison,  # type: ignore[arg-type]
        rng.choice((1.0, 1.0, 1.0, 1.0, 0.0, 10.0, 30.0)),
        rng.randrange(2**31),
    )  # fmt: skip


def lay(values: Tensor, layout: str, offset: int, rng: random.Random) -> Tensor:
    """`values` in memory of that layout; `overlapping` has other values of the same kind."""
    around = True if values.dtype == torch.bool else math.nan
    rank = values.dim()
    if layout == "expanded":
        kept = tuple(slice(0, 1) if rng.random() < 0.6 else slice(None) for _ in range(rank - 1))
        return lay(values[kept], "dense", offset, rng).expand(values.shape)
    order, steps, pads = list(range(rank)), [1] * rank, [0] * rank
    leading = order[:-1]
    if layout in ("permuted", "padded") and (layout == "permuted" or rng.random() < 0.5):
        rng.shuffle(leading)
        order = [*leading, rank - 1]
    if layout == "padded":
        pads = [rng.randrange(4) for _ in range(rank - 1)] + [rng.choice((1, 3, 8, 16))]
    elif layout == "stepped":
        steps = [rng.choice((1, 2)) for _ in range(rank - 1)] + [1]
    elif layout == "wide":
        steps[-1] = rng.choice((2, 3))
    elif layout == "columns":
        order[-2:] = order[:-3:-1]
    strides, size = [0] * rank, 1
    for dim in reversed(order):
        strides[dim] = size * steps[dim]
        size *= (values.shape[dim] + pads[dim]) * steps[dim]
    if layout == "overlapping":
        strides = [rng.choice((1, 3, 8, 16)) for _ in range(rank - 1)] + [1]
        size = 1 + sum(s * max(n - 1, 0) for s, n in zip(strides, values.shape, strict=True))
    memory = torch.full(
        (size + 2 * _GUARD + offset,), around, dtype=values.dtype, device=values.device
    )
    start = _GUARD + offset
    if layout == "overlapping":
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        memory[start : start + size] = torch.randn(size, generator=generator).to(memory)
        return memory.as_strided(values.shape, strides, start)
    return memory.as_strided(values.shape, strides, start).copy_(values)


def _seen(shape: tuple[int, ...], look: str, rng: random.Random, numbers: Tensor) -> Tensor:
    """Bool of a mask's shape: which keys it lets be seen."""
    rows, columns = torch.arange(shape[-2])[:, None], torch.arange(shape[-1])
    if look == "lengths":
        return (numbers[..., :1, :1] * 0.5 + 0.5) * shape[-1] > columns.expand(shape)
    if look == "window":
        width = rng.choice((0, 3, 10, 70))
        return ((columns <= rows) & (columns >= rows - width)).expand(shape)
    if look == "blocks":
        block = rng.choice((16, 64, 128))
        chosen = torch.tensor([rng.random() < 0.4 for _ in range(shape[-1] // block + 1)])
        return chosen[columns // block].expand(shape)
    if look == "nothing":
        return torch.zeros(shape, dtype=torch.bool)
    seen = numbers > -0.6
    if look == "rows" and shape[-2]:
        seen = seen & (torch.rand(shape[-2], 1, generator=_generator(rng)) > 0.4)
    return seen


def _generator(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(2**31))


def _mask(spec: Spec, rng: random.Random) -> Tensor | None:
    if spec.mask is None:
        return None
    numbers = torch.randn(spec.mask, generator=_generator(rng))
    seen = _seen(spec.mask, spec.look, rng, numbers)
    if spec.mask_dtype == "bool":
        return seen.clone()
    dtype = TORCH[spec.dtype] if spec.mask_dtype == "own" else torch.float32
    hidden = torch.finfo(dtype).min if spec.look == "lowest" else -math.inf
    return numbers.to(dtype).masked_fill(~seen, hidden)


def _spoil(spec: Spec, call: Call, rng: random.Random) -> None:
    """Writes NaN and infinities into some keys and values."""
    _, k, _ = call.expanded
    seen = call.visible.expand(*k.shape[:-2], spec.nq, spec.nk).any(-2)
    count = max(1, spec.nk // 8)
    for tensor in (call.key, call.value):
        if not tensor.numel():
            continue
        used = torch.zeros(tensor.shape[:-1], dtype=torch.bool)
        used = _gather(seen, used, call.enable_gqa)
        poison = math.nan if spec.poison == "seen" else rng.choice((math.nan, math.inf, -math.inf))
        if spec.poison == "hidden":
            tensor.masked_fill_(~used[..., None].to(tensor.device), poison)
        elif tensor is call.value or rng.random() < 0.3:
            for _ in range(count):
                tensor[tuple(rng.randrange(size) for size in tensor.shape)] = poison


def _gather(seen: Tensor, like: Tensor, gqa: bool) -> Tensor:
    """Brings `seen`, of all expanded dims, back to the shape of `like` by "any"."""
    seen = seen.cpu()
    if gqa:
        group = seen.shape[-2] // like.shape[-2] if like.shape[-2] else 1
        seen = seen.unflatten(-2, (like.shape[-2], group)).any(-2)
    while seen.dim() > like.dim():
        seen = seen.any(0)
    for dim, size in enumerate(like.shape):
        if size == 1 and seen.shape[dim] != 1:
            seen = seen.any(dim, keepdim=True)
    return seen


def make(spec: Spec, device: str) -> Call:
    """The call's tensors on that device."""
    rng = random.Random(spec.seed)
    dtype = TORCH[spec.dtype]
    tensors = []
    for index, shape in enumerate(
        (
            (*spec.q_lead, spec.nq, spec.d),
            (*spec.k_lead, spec.nk, spec.d),
            (*spec.v_lead, spec.nk, spec.dv),
        )
    ):
        values = torch.randn(shape, generator=_generator(rng)).to(device).to(dtype)
        if index == 0:
            values *= spec.logits
        tensors.append(lay(values, spec.layouts[index], spec.offsets[index], rng))
    mask = _mask(spec, rng)
    if mask is not None:
        mask = lay(mask.to(device), spec.layouts[3], spec.offsets[3], rng)
    call = Call(*tensors, mask, spec.causal, spec.scale, spec.gqa, spec.lower_right)
    if spec.poison and spec.nk:
        _spoil(spec, call, rng)
        call = Call(*tensors, mask, spec.causal, spec.scale, spec.gqa, spec.lower_right)
    return call
