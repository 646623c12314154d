"""Attention in float64, row by row of the definition: what candidates are held against.

It shares no code with any candidate and never takes one as reference. On big problems it computes
a sample of rows over all heads: the first and last ones, the edges of tiles, and random ones.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from autofa.bench.inputs import Inputs
from autofa.problem import Problem

# What one reference may cost: multiply-adds times two, and elements of the score matrix. Together
# about 0.1 s on two idle CPU cores, and 10 ms on a data-centre GPU (others have 1/64 of its float64
# rate, hence not more).
_FLOPS = {"cpu": 2e9, "cuda": 2e11}
_SCORES = {"cpu": 2e6, "cuda": 1e8}
# Largest intermediate, in elements of float64.
_CHUNK = 1 << 24
_FEWEST_ROWS = 16


@dataclass(frozen=True)
class Reference:
    """What is right, on the rows `rows` of each head.

    Attributes:
        out: (B, Hq, R, Dv) float64; rows with nothing to attend to are 0.
        lse: (B, Hq, R) float64, natural log; -inf on such rows.
        scale: (B, Hq, R) float64: the size an output of this row naturally has, the larger of its
            largest element and sqrt(sum p^2) times the root mean square of V.
        largest_score: the largest |scaled score| of a visible key.
    """

    rows: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    scale: torch.Tensor
    largest_score: float


def sample_rows(problem: Problem, seed: int = 0) -> list[int]:
    """The query rows to compare, sorted; all of them where that is cheap enough."""
    p = problem
    per_row = 2.0 * p.batch * p.heads_q * p.seqlen_k * (p.head_dim + p.head_dim_v)
    group = p.heads_q // p.heads_kv
    affordable = (
        _FLOPS[p.device] / per_row,
        _SCORES[p.device] / (p.batch * p.heads_q * p.seqlen_k),
        _CHUNK / (group * p.seqlen_k),
    )
    count = max(int(min(affordable)), _FEWEST_ROWS)
    if count >= p.seqlen_q:
        return list(range(p.seqlen_q))
    last = p.seqlen_q - 1
    edges = [0, last, last - last % 128, last - last % 64, last - last % 128 - 1]
    edges += [row for tile in (16, 64, 128) for row in (tile - 1, tile)]
    chosen = {row for row in edges if 0 <= row <= last}
    generator = random.Random(seed)
    while len(chosen) < count:
        chosen.add(generator.randrange(p.seqlen_q))
    return sorted(chosen)


def _hidden(inputs: Inputs, rows: torch.Tensor) -> torch.Tensor | None:
    """(R, Nk) bool of the keys that a causal mask hides; None if it is not causal."""
    p = inputs.problem
    if not p.causal:
        return None
    shift = p.seqlen_k - p.seqlen_q if inputs.lower_right else 0
    keys = torch.arange(p.seqlen_k, device=rows.device)
    return keys[None, :] > rows[:, None] + shift


def _mask(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask.double()


def attention(inputs: Inputs, scale: float | None = None) -> Reference:
    """The reference of one call, with the default scale 1/sqrt(D) unless given."""
    p = inputs.problem
    device = inputs.query.device
    rows = torch.tensor(sample_rows(p), device=device)
    factor = 1.0 / math.sqrt(p.head_dim) if scale is None else scale
    group = p.heads_q // p.heads_kv
    count = len(rows)
    hidden = _hidden(inputs, rows)
    # All (batch, key head) pairs in one dimension, the query heads of a group in the next.
    query = inputs.query[:, :, rows].reshape(-1, group, count, p.head_dim)
    key, value = inputs.key.flatten(0, 1), inputs.value.flatten(0, 1)
    out, lse, sizes = [], [], []
    largest = torch.zeros((), dtype=torch.float64, device=device)
    step = max(1, _CHUNK // (p.seqlen_k * max(group * count, p.head_dim, p.head_dim_v)))
    for first in range(0, p.batch * p.heads_kv, step):
        part = slice(first, first + step)
        scores = query[part].double() @ key[part, None].double().mT * factor
        if inputs.attn_mask is not None:
            batches = torch.arange(p.batch * p.heads_kv, device=device)[part] // p.heads_kv
            scores = _mask(scores, inputs.attn_mask[:, :, rows][batches])
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        values = value[part, None].double()
        log_sum = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - log_sum.clamp(min=-1e300)[..., None])
        result = weights @ values
        natural = weights.square().sum(-1).sqrt() * values.square().mean((-2, -1)).sqrt()[..., None]
        out.append(result)
        lse.append(log_sum)
        sizes.append(torch.maximum(result.abs().amax(-1), natural))
        largest = torch.maximum(largest, scores.abs().nan_to_num(posinf=0.0).max())
    heads = (p.batch, p.heads_q, count)
    return Reference(
        rows,
        torch.cat(out).reshape(*heads, p.head_dim_v),
        torch.cat(lse).reshape(heads),
        torch.cat(sizes).reshape(heads),
        float(largest),
    )
