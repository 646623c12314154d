"""`cpu.flash`: flash attention on AVX2 and AVX-512, the embedded default where no GPU is."""

from __future__ import annotations

from autofa.device import Limits
from autofa.kernels.family import Constraint, Domain, KernelFamily, Param, Params, Value
from autofa.problem import EXPLICIT_MASKS, Problem

# Vector registers of an x86-64 level.
_REGISTERS = {"v3": 16, "v4": 32}


def _isa(limits: Limits) -> str:
    return f"v{limits.capability}"


def _tile_fits(p: Params, problem: Problem, limits: Limits) -> bool:
    """The sums, one row of queries and one broadcast element."""
    return bool(p.tile_keys * p.tile_queries + p.tile_queries + 1 <= _REGISTERS[p.isa])


def _tile_fills(p: Params, problem: Problem, limits: Limits) -> bool:
    return bool(4 * p.tile_keys * p.tile_queries >= 3 * _REGISTERS[p.isa])


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    if limits.capability >= 4:
        return {"isa": "v4", "tile_keys": 6, "tile_queries": 4, "block_k": 128}
    return {"isa": "v3", "tile_keys": 4, "tile_queries": 3, "block_k": 64}


def _small_and_faster(problem: Problem) -> bool:
    """Short problems that measured 1.2x and more of SDPA with AVX-512 in f32, head dims up to 128;
    and tiny ones (0.96-1.5x), where SDPA reached through autofa would cost the call itself again.
    """
    p = problem
    filled = -(-p.seqlen_q // 16) * 16
    work = p.batch * p.heads_q * filled * p.seqlen_k * (p.head_dim + p.head_dim_v)
    if max(p.head_dim, p.head_dim_v) > 128:
        return False
    if min(p.seqlen_q, p.seqlen_k) >= 16 or work <= 2**15:
        return True
    return p.seqlen_q >= 8 and 8 <= p.seqlen_k <= 64


def _surely_faster(problem: Problem, limits: Limits) -> bool:
    """Where the default measured faster than SDPA throughout: 1.07x and more with AVX-512, 1.02x
    with AVX2, which SDPA was then held to.

    What is left out: few queries leave lanes idle (down to 0.5x), few keys and large head dims are
    mostly moving queries and outputs (0.4-1.3x); keys and values that leave the cache meet narrow
    AVX2 panels (0.8-1.2x); for bf16 SDPA has instructions that this kernel does not use. With
    explicit masks, AVX2 had 0.94-1.5x; AVX-512 had 1.07x and more in f32 and f16.
    """
    p = problem
    if p.mask in EXPLICIT_MASKS and limits.capability < 4:
        return False
    widest = max(p.head_dim, p.head_dim_v)
    if p.dtype == "f32" and limits.capability >= 4 and _small_and_faster(p):
        return True
    if min(p.seqlen_q, p.seqlen_k) < 32 or widest > 256:
        return False
    if p.dtype == "bf16" and limits.features & {"amx_bf16", "avx512_bf16"}:
        return False
    if limits.capability >= 4 or p.causal:
        return True
    return p.seqlen_k * (p.head_dim + p.head_dim_v) <= 2**17


FAMILY = KernelFamily(
    name="cpu.flash",
    title="cpu(flash)",
    version=1,
    folder="cpu_flash",
    entry="kernel.h",
    domain=Domain(
        device="cpu",
        dtypes=("f32", "f16", "bf16"),
        min_arch=3,
        max_arch=4,
    ),
    params=(
        Param("isa", ("v3", "v4"), about="x86-64 level: AVX2 or AVX-512"),
        Param("tile_keys", (4, 6, 8, 9), "k{}", about="rows of the register tile"),
        Param("tile_queries", (2, 3, 4), "q{}", joined=True, about="vectors of queries of a panel"),
        Param("block_k", (64, 128, 256), "b{}", about="keys between two rescalings"),
    ),
    constraints=(
        Constraint(
            "isa",
            "AVX-512 is used where it is: AVX2 reached 52-60 % of its speed",
            lambda p, problem, limits: p.isa == _isa(limits),
        ),
        Constraint("registers", "the register tile fits in the vector registers", _tile_fits),
        Constraint(
            "tile area",
            "sums in fewer than 3/4 of the registers do not hide their latency (0-20 % slower)",
            _tile_fills,
        ),
    ),
    specialised=("dtype",),
    target=lambda p, limits: f"x86-64-{p.isa}",
    default=_default,
    unmeasured=_surely_faster,
)
