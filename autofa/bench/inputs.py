"""Random inputs of a case, in memory whose surroundings are watched.

A `Frame` is a tensor inside a larger allocation: guard before, after, after each head's last row
and after each row's last column. The surroundings hold a NaN of a known bit pattern, so that a
kernel that reads them gives NaN and one that writes them is found.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch

from autofa.bench.protocol import Case
from autofa.problem import EXPLICIT_MASKS, Problem

TORCH_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Quiet NaNs in their own element type. Arithmetic may hand a payload on, so inputs bear another one
# than memory to be written: what was computed from a NaN is then told from what was not written.
_UNWRITTEN = {torch.float32: 0x7FC5A5A5, torch.float16: 0x7EA5, torch.bfloat16: 0x7FE5}
_UNREADABLE = {torch.float32: 0x7FCB4B4B, torch.float16: 0x7E5A, torch.bfloat16: 0x7FDA}
_BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
# Elements before and after, and rows after each head: a tile of 128 rows written past the end stays
# inside, so that it is reported instead of crashing.
_AROUND = 1 << 14
_ROWS = 128
# Keeps rows and heads aligned as they were, for kernels that need it.
_COLUMN_BYTES = 64
# Of a frame's first element: what abi.h promises for a workspace.
_ALIGNMENT = 256


class Frame:
    """A tensor `view` with guarded surroundings, all of it filled with the canary at first.

    Args:
        shape: (B, H, N, D); any shape with layout `flat`.
        layout: `bhnd` or `bnhd`, the order in memory, with guard rows and columns; or `flat`,
            contiguous, with guard before and after only.
        written: whether a candidate is to write it, rather than to read it.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        layout: str,
        dtype: torch.dtype,
        device: torch.device,
        *,
        written: bool = True,
    ) -> None:
        if layout == "flat":
            body = shape
        else:
            batch, heads, rows, columns = shape
            width = columns + _COLUMN_BYTES // dtype.itemsize
            body = (batch, heads, rows + _ROWS, width)
            if layout == "bnhd":
                body = (batch, rows + _ROWS, heads, width)
        size = math.prod(body)
        spare = _ALIGNMENT // dtype.itemsize
        kind = _BITS[dtype]
        self._canary = (_UNWRITTEN if written else _UNREADABLE)[dtype]
        self._bits = torch.full(
            (size + 2 * _AROUND + spare,), self._canary, dtype=kind, device=device
        )
        start = _AROUND + -self._bits.data_ptr() % _ALIGNMENT // dtype.itemsize
        inner = self._bits[start : start + size].view(dtype).view(body)
        if layout == "bnhd":
            inner = inner.transpose(1, 2)
        self.view = inner if layout == "flat" else inner[:, :, :rows, :columns]

    def refill(self) -> None:
        """Back to the canary everywhere."""
        self._bits.fill_(self._canary)

    def untouched(self) -> torch.Tensor:
        """Bool, of the view's shape: which elements still hold the canary."""
        return self.view.view(self._bits.dtype) == self._canary

    def checksum(self) -> int:
        """Changes when any byte of the frame does, surroundings included."""
        return int(self._bits.sum(dtype=torch.int64))

    def damage(self) -> str | None:
        """Where the surroundings were written; None if they were not. Destroys nothing."""
        probe = self._bits.clone()
        start = self.view.storage_offset()
        inside = probe.view(self.view.dtype).as_strided(self.view.shape, self.view.stride(), start)
        inside.view(self._bits.dtype).fill_(self._canary)
        written = (probe != self._canary).nonzero()
        if not len(written):
            return None
        first = int(written[0])
        return f"{len(written)} elements, the first at offset {first - start} from its start"


@dataclass(frozen=True)
class Inputs:
    """One call's arguments. `frames` are those of q, k, v where they are guarded."""

    problem: Problem
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    frames: tuple[Frame, ...] = ()

    @property
    def is_causal(self) -> bool:
        return self.problem.mask == "causal"

    @property
    def lower_right(self) -> bool:
        return self.problem.mask == "causal_lower_right"

    @property
    def enable_gqa(self) -> bool:
        return self.problem.heads_q != self.problem.heads_kv

    def checksum(self) -> tuple[int, ...]:
        return tuple(frame.checksum() for frame in self.frames)

    def sdpa_arguments(self) -> dict[str, object]:
        """Keyword arguments of torch's scaled_dot_product_attention, as a user writes them."""
        mask: object = self.attn_mask
        if self.lower_right:
            # Costs 1.3 s, more than the rest of a worker's start: it loads torch's compiler.
            from torch.nn.attention.bias import causal_lower_right

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of NaN in rows with nothing to attend to
                mask = causal_lower_right(self.problem.seqlen_q, self.problem.seqlen_k)
        found: dict[str, object] = {}
        if mask is not None:
            found["attn_mask"] = mask
        if self.is_causal:
            found["is_causal"] = True
        if self.enable_gqa:
            found["enable_gqa"] = True
        return found


def _random(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Standard normal q (times `case.logits`), k and v. Values depend on the problem, the seed and
    the factor only, so that cases that differ in layout share a reference."""
    p = case.problem
    dtype = TORCH_DTYPES[p.dtype]
    generator = torch.Generator(device=device)
    generator.manual_seed(case.seed)
    shapes = (
        (p.batch, p.heads_q, p.seqlen_q, p.head_dim),
        (p.batch, p.heads_kv, p.seqlen_k, p.head_dim),
        (p.batch, p.heads_kv, p.seqlen_k, p.head_dim_v),
    )
    tensors: list[torch.Tensor] = []
    frames: list[Frame] = []
    for index, shape in enumerate(shapes):
        values = _random(shape, generator, device)
        if index == 0 and case.logits != 1.0:
            values *= case.logits
        if case.guarded:
            frame = Frame(shape, case.layout, dtype, device, written=False)
            frame.view.copy_(values)
            frames.append(frame)
            tensors.append(frame.view)
        elif case.layout == "bnhd":
            batch, heads, rows, columns = shape
            dense = torch.empty((batch, rows, heads, columns), dtype=dtype, device=device)
            tensors.append(dense.transpose(1, 2).copy_(values))
        else:
            tensors.append(values.to(dtype))
    mask: torch.Tensor | None = None
    if p.mask in EXPLICIT_MASKS:
        scores = _random((p.batch, 1, p.seqlen_q, p.seqlen_k), generator, device)
        # About a sixth of the keys hidden; the first stays, so that no row is empty.
        mask = scores > -1.0 if p.mask == "bool" else scores.to(dtype)
        if p.mask == "bool":
            mask[..., 0] = True
    query, key, value = tensors
    return Inputs(p, query, key, value, mask, tuple(frames))


def another_copy(inputs: Inputs) -> Inputs:
    """The same values in other memory, for rotation."""
    mask = None if inputs.attn_mask is None else inputs.attn_mask.clone()
    return Inputs(
        inputs.problem, inputs.query.clone(), inputs.key.clone(), inputs.value.clone(), mask
    )
