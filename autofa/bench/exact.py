"""One call of attention as users write it, judged against float64 from the definition.

Any rank, strides, mask and scale that SDPA takes; NaN and infinities too, which must stay where the
mask puts them. `reference.py` is for the large problems that are timed; this one computes all rows
of small ones. Errors are bounded as `check.py` bounds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch._C._nn import scaled_dot_product_attention as sdpa

from autofa.bench.check import FLOOR, LSE_FLOOR, PER_SCORE, TIMES_FAST, TIMES_SDPA

_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# f64, which plain SDPA serves: as many units in the last place as in f32.
_F64 = 2.0**-29
# Additive masks below it hide: the score they are added to is lost in f32 as it is in f64.
_LOWEST = -1e30
# Scores that some step in f16 may not hold.
_LARGE = 2.0**14
# Of an output's natural size: the error that rounding of its scores may make, and no check is left.
_DROWNED = 0.5
# Keys with less weight than this move no result by more than the bounds.
_WEIGHT = 1e-9


@dataclass(frozen=True)
class Call:
    """Arguments of one valid call; `lower_right` is the corner that `is_causal` hangs on."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    lower_right: bool = False

    @cached_property
    def expanded(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three in float64 and of the same leading sizes."""
        q, k, v = (t.double() for t in (self.query, self.key, self.value))
        if self.enable_gqa and q.shape[-3] != k.shape[-3]:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        shapes = (q.shape[:-2], k.shape[:-2], v.shape[:-2])
        lead = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        return (
            q.expand(*lead, *q.shape[-2:]),
            k.expand(*lead, *k.shape[-2:]),
            v.expand(*lead, *v.shape[-2:]),
        )

    @cached_property
    def visible(self) -> Tensor:
        """Bool, (Nq, Nk) or more dims: which keys a query attends to."""
        q, k = self.query, self.key
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        if self.is_causal:
            seen = seen.tril(k.shape[-2] - q.shape[-2] if self.lower_right else 0)
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            seen = seen & self.attn_mask
        elif self.attn_mask is not None:
            seen = seen & (self.attn_mask != -math.inf)
        return seen

    @property
    def factor(self) -> float:
        if self.scale is not None:
            return self.scale
        return self.query.shape[-1] ** -0.5 if self.query.shape[-1] else 0.0


class Truth:
    """What is right for a call.

    Attributes:
        out: (..., Nq, Dv) float64; 0 in rows that see nothing, NaN where a NaN or an infinity of K
            or V is seen.
        lse: (..., Nq) float64, natural log; -inf in rows that see nothing.
        reached: bool, of the shape of `out`: where such a value lies among the keys, seen or not.
            Kernels that multiply it by a weight of 0 give NaN there.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.dtype = _NAMES.get(call.query.dtype, "f64")
        q, k, v = call.expanded
        good_k, good_v = k.isfinite().all(-1), v.isfinite()
        k, clean = k.masked_fill(~good_k[..., None], 0.0), v.masked_fill(~good_v, 0.0)
        scores = q @ k.mT * call.factor
        # What a score's rounding grows with: its size, and that of the products it sums.
        lengths = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]
        sizes = scores.abs() + lengths * abs(call.factor) / max(q.shape[-1], 1) ** 0.5
        seen = call.visible.expand(scores.shape)
        if call.attn_mask is not None and call.attn_mask.dtype != torch.bool:
            bias = call.attn_mask.double()
            scores = scores + bias
            sizes = sizes + bias.abs().masked_fill(bias < _LOWEST, 0.0)
        scores = scores.masked_fill(~seen, -math.inf)
        self.lse = torch.logsumexp(scores, -1)
        # Not by the log-sum-exp, from which large scores that are alike cannot be told.
        weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
        out = weights @ clean
        self._bad_key = (~good_k).any(-1, keepdim=True)
        self._nan_score = (seen & ~good_k[..., None, :]).any(-1)
        spoiled = seen.double() @ (~good_v).double() > 0
        spoiled = spoiled | self._nan_score[..., None]
        self.out = out.masked_fill(spoiled, math.nan)
        self.reached = (
            (~good_v).any(-2, keepdim=True) | (~good_k).any(-1)[..., None, None]
        ).expand(out.shape)
        # The size that an output of this row naturally has.
        rms = (
            clean.square().mean((-2, -1)).sqrt()[..., None] if v.numel() else self.lse.new_zeros(())
        )
        self.most = float(clean.abs().max()) if clean.numel() else 0.0
        natural = weights.square().sum(-1).sqrt() * rms
        self.natural = torch.maximum(out.abs().amax(-1), natural) if out.shape[-1] else natural
        relevant = sizes.masked_fill(weights < _WEIGHT, 0.0)
        self.size = relevant.amax(-1) if relevant.shape[-1] else torch.zeros_like(self.lse)

    def _scaled(self, got: Tensor) -> Tensor:
        """Errors in units of what is natural; infinite for NaN where there should be a number."""
        difference = (got.double() - self.out).abs()
        difference = difference.masked_fill(self.out.isnan(), 0.0)
        return difference.nan_to_num(nan=math.inf) / self.natural.clamp(min=1e-30)[..., None]

    @cached_property
    def sdpa_error(self) -> float:
        """Plain SDPA's largest scaled error, given the same values in the plainest form."""
        call = self.call
        kind = call.query.dtype
        q, k, v = (t.to(kind).nan_to_num(0.0, 0.0, 0.0).contiguous() for t in call.expanded)
        mask = call.visible.expand(*q.shape[:-1], k.shape[-2])
        if call.attn_mask is not None and call.attn_mask.dtype != torch.bool:
            # In the query's dtype, since not every backend takes another.
            mask = call.attn_mask.to(kind).masked_fill(~call.visible, -math.inf).expand(mask.shape)
        sign = math.copysign(1.0, call.factor) if call.factor else 0.0
        out = sdpa(q * sign, k, v, mask, scale=abs(call.factor) or 1.0)
        scaled = self._scaled(out)
        # Plain SDPA gives NaN on some empty rows; it then sets no standard.
        usable = torch.where(scaled < 1.0, scaled, 0.0)
        return float(usable.max()) if usable.numel() else 0.0

    def wrong(self, got: Tensor, *, fast: bool = False, masks_values: bool = True) -> str | None:
        """What is wrong with an output, in one line; None if nothing is.

        Args:
            fast: it is held to the wider bound of that accuracy class.
            masks_values: a hidden NaN must not come out, and a visible one must; False for kernels
                of other libraries.
        """
        if got.shape != self.out.shape or got.dtype != self.call.query.dtype:
            want = f"{tuple(self.out.shape)} {self.call.query.dtype}"
            return f"got {tuple(got.shape)} {got.dtype} instead of {want}"
        if not got.numel():
            return None
        floor, per_score = FLOOR.get(self.dtype, _F64 * FLOOR["f32"]), PER_SCORE
        if self.dtype == "f64":
            per_score = _F64 * PER_SCORE
        excused = torch.zeros_like(self.reached) if masks_values else self.reached & ~got.isfinite()
        times = 1.0
        if fast:
            times = TIMES_FAST
            per_score = floor / 8  # of scores rounded to 16 bits, which may also overflow
            excused = excused | (self.size > _LARGE)[..., None]
        else:
            # Of scores whose own rounding says which key wins any mean of values will do.
            drowned = (per_score * self.size >= _DROWNED)[..., None]
            excused = excused | (drowned & (got.double().abs() <= 1.01 * self.most))
        scaled = self._scaled(got).masked_fill(excused, 0.0)
        allowed = times * (floor + per_score * self.size)[..., None]
        bad = ~(scaled <= allowed)
        if bool(bad.any()):
            bad &= ~(scaled <= times * TIMES_SDPA * self.sdpa_error)
        if masks_values:  # what sees a NaN or an infinity is no number; torch's flash gives 0 there
            bad |= self.out.isnan() & got.isfinite()
        if not bool(bad.any()):
            return None
        place = tuple(int(i) for i in bad.nonzero()[0])
        error, bound = float(scaled[place]), float(allowed.expand(scaled.shape)[place])
        return (
            f"{int(bad.sum())} of {got.numel()} wrong, at {place}: got {float(got[place]):.6g} "
            f"instead of {float(self.out[place]):.6g}; error {error:.3g}, allowed {bound:.3g}, "
            f"plain SDPA's {self.sdpa_error:.3g}"
        )

    def wrong_lse(
        self, lse: Tensor, *, fast: bool = False, masks_values: bool = True
    ) -> str | None:
        """What is wrong with a log-sum-exp, in f32; rows that see a NaN may have any. Arguments as
        of `wrong`."""
        if lse.shape != self.lse.shape or lse.dtype != torch.float32:
            want = f"{tuple(self.lse.shape)} float32"
            return f"log-sum-exp {tuple(lse.shape)} {lse.dtype} instead of {want}"
        floor = LSE_FLOOR.get(self.dtype, LSE_FLOOR["f32"])
        allowed = floor + 2 * PER_SCORE * self.size
        if fast:
            allowed = TIMES_FAST * allowed + 2.0**-9 * self.size  # scores are summed in 16 bits
        elif not masks_values:
            allowed = allowed + FLOOR["f32"] * self.size
        got = lse.double()
        excused = self._nan_score | ((got < _LOWEST) & (self.lse < _LOWEST) & got.isfinite())
        if not masks_values:
            excused = excused | (self._bad_key & got.isnan())
        right = self.lse.float().double()  # what is out of the range of f32 is infinite there
        bad = ~((got == right) | ((got - right).abs() <= allowed))
        bad &= ~excused
        if fast:
            bad &= self.size <= _LARGE
        if not bool(bad.any()):
            return None
        place = tuple(int(i) for i in bad.nonzero()[0])
        return (
            f"log-sum-exp: {int(bad.sum())} of {got.numel()} wrong, at {place}: got "
            f"{float(got[place]):.6g} instead of {float(self.lse[place]):.6g}"
        )
