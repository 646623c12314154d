"""The inputs that a candidate must get right before it is timed: its problem, and odd ones like it.

The problem's own shape is what will be dispatched; the odd ones are where attention kernels go
wrong: lengths that fill no tile, other strides, grouped heads, causal with unequal lengths, large
scores. A case outside the candidate's declared domain is left out.
"""

from __future__ import annotations

from dataclasses import replace

from autofa.bench.protocol import Case
from autofa.device import Limits
from autofa.kernels import Candidate
from autofa.kernels.family import Variant
from autofa.problem import Problem, ragged_neighbour

# Lengths of the small cases: one full tile of any size up to 128 and a ragged rest, on both sides.
_SHORT, _LONG = 149, 274
# Large scores: standard deviation 24 with standard normal input, so that softmax is nearly one-hot
# and overflows without its running maximum.
_LARGE = 24.0
# The longest side of a problem-sized case beyond the problem itself; longer ones find nothing more.
_LONGEST = 2048


def _shortened(problem: Problem) -> Problem:
    """The same kind with fewer sequences and at most `_LONGEST` rows: what a check can afford."""
    heads_kv = min(problem.heads_kv, 2)
    return replace(
        problem,
        batch=min(problem.batch, 2),
        heads_kv=heads_kv,
        heads_q=problem.heads_q // problem.heads_kv * heads_kv,
        seqlen_q=min(problem.seqlen_q, _LONGEST),
        seqlen_k=min(problem.seqlen_k, _LONGEST),
    )


def cases_for(candidate: Candidate, problem: Problem, limits: Limits) -> tuple[Case, ...]:
    """The cases of one candidate: guarded ones first, the problem itself last. Beside what is left
    out they depend on the problem only, so its candidates share inputs and references."""
    ragged = ragged_neighbour(_shortened(problem))
    small = replace(problem, batch=2, heads_q=4, heads_kv=4, seqlen_q=_LONG, seqlen_k=_LONG)
    short_q = replace(small, seqlen_q=_SHORT)
    short_k = replace(small, seqlen_k=_SHORT)
    cases = [
        Case("ragged lengths", ragged, seed=2, repeat=True),
        Case("(B,N,H,D) strides", ragged, layout="bnhd", seed=2),
        Case("fewer queries than keys", short_q, seed=4),
        Case("more queries than keys", short_k, layout="bnhd", seed=5),
        Case("grouped heads", replace(small, heads_kv=2), seed=6),
        Case("one query", replace(small, seqlen_q=1), seed=7),
        Case("large scores", small, logits=_LARGE, seed=8),
        Case("the problem", problem),
        # Once more costs little on a GPU, and much on a CPU, whose races the ragged case shows.
        Case("the problem as called", problem, guarded=False, repeat=problem.device == "cuda"),
    ]
    if not isinstance(candidate, Variant):
        # Another library's kernel writes to memory that it allocates itself: nothing to guard.
        cases = [replace(case, guarded=False) for case in cases if case.name != "the problem"]
    return tuple(
        case
        for case in cases
        if case.problem == problem or candidate.refusal(case.problem, limits) is None
    )
