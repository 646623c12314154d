"""`Problem`, one attention call's shape and kind; `Bucket`, problems that share a winner."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from autofa.errors import DTypeError, UsageError, explain_bad

DTYPES = ("f32", "f16", "bf16")
DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
_DTYPE_ALIASES = {
    "float32": "f32",
    "float": "f32",
    "float16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
}
EXPLICIT_MASKS = ("bool", "additive")
MASKS = ("none", "causal", "causal_lower_right", *EXPLICIT_MASKS)
DEVICES = ("cuda", "cpu")

# Largest size of one dimension: products of two still fit 64 bits with room for byte offsets.
MAX_DIM = 2**31 - 1
MAX_HEAD_DIM = 65536

SHAPE_FORM = "B,H,N,D or B,Hq/Hkv,Nq/Nk,D/Dv"


def parse_dtype(text: str) -> str:
    """The canonical name (`f32`, `f16`, `bf16`) of a dtype's name, torch's names included.

    Raises:
        DTypeError: the name is not one of these.
    """
    name = text.strip().lower().removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name not in DTYPES:
        raise DTypeError(
            explain_bad("dtype", text, ", ".join(DTYPES), "choose one of these (torch's names too)")
        )
    return name


@dataclass(frozen=True, order=True)
class Problem:
    """One attention call.

    Attributes:
        dtype: of query, key, value and output: `f32`, `f16` or `bf16`.
        batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v: the sizes; query is
            (batch, heads_q, seqlen_q, head_dim), value (batch, heads_kv, seqlen_k, head_dim_v).
        mask: one of `MASKS`; `causal` hangs on the upper-left corner, as in torch.
        device: `cuda` or `cpu`.
        dropout, needs_grad: whether the call has these.
    """

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    mask: str = "none"
    device: str = "cuda"
    dropout: bool = False
    needs_grad: bool = False

    @property
    def causal(self) -> bool:
        return self.mask in ("causal", "causal_lower_right")

    @property
    def flops(self) -> float:
        """Multiply-adds of QK and PV times two; half of that for causal, as the field counts it."""
        full = (
            2.0
            * self.batch
            * self.heads_q
            * self.seqlen_q
            * self.seqlen_k
            * (self.head_dim + self.head_dim_v)
        )
        return full / 2 if self.causal else full

    @property
    def bytes(self) -> int:
        """The fewest bytes that move: each input read once, the output written once."""
        q = self.heads_q * self.seqlen_q * (self.head_dim + self.head_dim_v)
        kv = self.heads_kv * self.seqlen_k * (self.head_dim + self.head_dim_v)
        return self.batch * (q + kv) * DTYPE_BYTES[self.dtype]

    @property
    def shape(self) -> str:
        """The shape as `--shape` takes it, shortest form."""

        def pair(a: int, b: int) -> str:
            return str(a) if a == b else f"{a}/{b}"

        return ",".join(
            (
                str(self.batch),
                pair(self.heads_q, self.heads_kv),
                pair(self.seqlen_q, self.seqlen_k),
                pair(self.head_dim, self.head_dim_v),
            )
        )

    def tflops(self, milliseconds: float) -> float:
        return self.flops / (milliseconds * 1e-3) / 1e12 if milliseconds > 0 else math.nan


def check(problem: Problem) -> Problem:
    """`problem` itself, if its fields are possible.

    Raises:
        UsageError: an unknown name, or a size that no call can have.
    """
    parse_dtype(problem.dtype)
    if problem.mask not in MASKS:
        raise UsageError(explain_bad("mask", problem.mask, ", ".join(MASKS), "choose one of these"))
    if problem.device not in DEVICES:
        raise UsageError(explain_bad("device", problem.device, "cuda, cpu", "choose one of these"))
    for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
        size = getattr(problem, name)
        limit = MAX_HEAD_DIM if name.startswith("head_dim") else MAX_DIM
        if not 1 <= size <= limit:
            raise UsageError(explain_bad(name, size, f"1 ... {limit}", f"give it as {SHAPE_FORM}"))
    if problem.heads_q % problem.heads_kv:
        raise UsageError(
            explain_bad(
                "heads",
                f"{problem.heads_q}/{problem.heads_kv}",
                "query heads that are a multiple of the key heads",
                "change one of the two",
            )
        )
    return problem


def parse_shape(
    text: str, *, dtype: str = "f16", mask: str = "none", device: str = "cuda"
) -> Problem:
    """The problem that `--shape` names: `B,H,N,D` or `B,Hq/Hkv,Nq/Nk,D/Dv`.

    Raises:
        UsageError: the text has another form, or a size is impossible.
    """
    fields = [f.strip() for f in text.split(",")]
    bad = UsageError(
        explain_bad("shape", text, SHAPE_FORM, "write four fields, for example 1,8,1024,64")
    )
    if len(fields) != 4 or not re.fullmatch(r"[0-9]{1,10}", fields[0]):
        raise bad
    pairs = []
    for field in fields[1:]:
        if not re.fullmatch(r"[0-9]{1,10}(/[0-9]{1,10})?", field):
            raise bad
        first, _, second = field.partition("/")
        pairs.append((int(first), int(second or first)))
    heads, seqlens, head_dims = pairs
    sizes = (int(fields[0]), *heads, *seqlens, *head_dims)
    return check(Problem(parse_dtype(dtype), *sizes, mask, device))


def nearest_power_of_two(n: int) -> int:
    """The power of two nearest to `n` in log space; 0 stays 0. csrc/runtime/key.h has its twin."""
    if n <= 1:
        return max(n, 0)
    k = n.bit_length() - 1
    return 1 << (k + (n * n >= 1 << (2 * k + 1)))


@dataclass(frozen=True, order=True)
class Bucket:
    """Problems that share one measured winner.

    dtype, head dims, mask, device and the group size Hq/Hkv are exact; batch, heads_kv, seqlen_q
    and seqlen_k are rounded to the nearest power of two. Key heads are rounded and query heads
    derived from them, so that a bucket's representative is itself a possible shape.
    """

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    mask: str
    device: str

    @property
    def problem(self) -> Problem:
        """The representative, which profiles measure."""
        return Problem(
            self.dtype,
            self.batch,
            self.heads_q,
            self.heads_kv,
            self.seqlen_q,
            self.seqlen_k,
            self.head_dim,
            self.head_dim_v,
            self.mask,
            self.device,
        )

    def __str__(self) -> str:
        return f"{self.problem.shape} {self.dtype} {self.mask}"


def bucket_of(problem: Problem) -> Bucket:
    """The bucket of a problem. Total, idempotent (on representatives) and monotone."""
    heads_kv = nearest_power_of_two(problem.heads_kv)
    group = problem.heads_q // problem.heads_kv if problem.heads_kv else 1
    return Bucket(
        problem.dtype,
        nearest_power_of_two(problem.batch),
        heads_kv * group,
        heads_kv,
        nearest_power_of_two(problem.seqlen_q),
        nearest_power_of_two(problem.seqlen_k),
        problem.head_dim,
        problem.head_dim_v,
        problem.mask,
        problem.device,
    )


def ragged_neighbour(problem: Problem) -> Problem:
    """A shape of the same kind whose lengths fill no tile, for checking correctness."""

    def shorten(n: int) -> int:
        return (n - 1 - n // 16) | 1 if n > 16 else n

    return replace(problem, seqlen_q=shorten(problem.seqlen_q), seqlen_k=shorten(problem.seqlen_k))
