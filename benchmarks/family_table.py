"""What each family is good for: its best tile per number of stages, from a tuned database.

    python benchmarks/family_table.py [--db PATH] [--device NAME] [--shape 2,16,8192,64 ...]

Three tables, by device time. First, per shape, dtype and mask: the best variant of each family and
number of stages over the best of SDPA's flash (where it serves the shape) and efficient backends,
as ratios within one run. Second, each family's best variant with what it takes of an SM. Third, in
how many of the buckets each family is the best of our own.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from autofa import compiler, settings
from autofa.compiler.render import static_smem_bytes
from autofa.device import Limits, cuda_build_arch, cuda_limits
from autofa.kernels import REGISTRY, mma
from autofa.kernels.family import Variant
from autofa.problem import Problem
from autofa.store.ranking import is_valid, validity
from autofa.store.repository import Repository
from autofa.store.rows import Row

# What ratios are to: FlashAttention-2 where it serves the head dim, else the efficient backend.
PEERS = ("torch.flash", "torch.efficient")


@dataclass(frozen=True)
class Measured:
    """A variant's row, with its speed relative to plain SDPA of the same run."""

    variant: Variant
    row: Row
    speedup: float

    @property
    def stages(self) -> object:
        return getattr(self.variant.params, "stages", "-")


def still_ours(row: Row) -> bool:
    """Whether it is of a variant as its sources are today. Peers count with any version: ratios
    are within their own run."""
    own = isinstance(REGISTRY.find(row.slug), Variant)
    return own and is_valid(validity(row, REGISTRY, compiler.fingerprint))


def best(found: Iterable[Measured]) -> Measured:
    return max(found, key=lambda each: each.speedup)


def measured(rows: Iterable[Row]) -> tuple[list[Measured], dict[str, float]]:
    """Our own variants, and the speedups of SDPA's single backends, of one problem."""
    own: list[Measured] = []
    peers: dict[str, float] = {}
    for row in rows:
        speedup = row.speedup("graph")
        if speedup is None:
            continue
        candidate = REGISTRY.find(row.slug)
        if isinstance(candidate, Variant) and candidate.accuracy(row.problem.dtype) == "f32":
            own.append(Measured(candidate, row, speedup))
        elif row.slug in PEERS:
            peers[row.slug] = speedup
    return own, peers


def residency(
    each: Measured, limits: Limits, here: settings.Settings
) -> tuple[int, object, object]:
    """Shared memory of a block, registers of a thread, blocks per SM; `-` where not compiled."""
    smem = static_smem_bytes(each.variant)
    library = compiler.library_of(each.variant, each.variant.target(limits), here)
    record = compiler.record_of(library) if library is not None else None
    if record is None or record.usage is None:
        return smem, "-", "-"
    threads = each.variant.family.threads(each.variant.params, each.row.problem)
    # Registers are given out to warps in steps of 256.
    per_warp = -(-record.usage.registers * 32 // 256) * 256
    blocks = min(
        limits.regs_per_sm // (per_warp * threads // 32),
        mma.resident_blocks(smem, limits),
        2048 // threads,
    )
    return smem, record.usage.registers, blocks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--db", type=Path, default=None)
    parser.add_argument("--device", default=None, help="part of the device's name")
    parser.add_argument("--shape", action="append", default=[], help="only these; repeatable")
    arguments = parser.parse_args()
    here = settings.load()
    with Repository.open(arguments.db or settings.database(here), write=False) as repository:
        rows = repository.rows(ok_only=True)
    if arguments.device:
        rows = [row for row in rows if arguments.device.lower() in row.device.name.lower()]
    rows = [row for row in rows if row.slug in PEERS or still_ours(row)]
    problems: dict[Problem, list[Row]] = {}
    for row in rows:
        if row.device.kind == "cuda" and (
            not arguments.shape or row.problem.shape in arguments.shape
        ):
            problems.setdefault(row.problem, []).append(row)

    stages_table, family_table = [], []
    wins: Counter[str] = Counter()
    for problem, found in problems.items():
        own, peers = measured(found)
        peer = next((name for name in PEERS if name in peers), None)
        if not own or peer is None:
            continue
        arch = cuda_build_arch(int(found[0].device.arch.removeprefix("sm_").rstrip("a")))
        limits = cuda_limits(arch, found[0].device.units)
        wins[best(own).variant.family_name] += 1
        name = f"{problem.shape} {problem.dtype} {problem.mask}"
        for family in dict.fromkeys(each.variant.family_name for each in own):
            mine = [each for each in own if each.variant.family_name == family]
            line: list[object] = [name, peer, family]
            for stages in (1, 2, 3, 4):
                at = [each for each in mine if each.stages == stages]
                line.append(best(at).speedup / peers[peer] if at else None)
            stages_table.append(line)
            top = best(mine)
            took = top.row.milliseconds("graph")
            smem, registers, blocks = residency(top, limits, here)
            ratio = top.speedup / best(own).speedup
            family_table.append(
                [name, top.variant.slug, smem, registers, blocks, took, top.speedup, ratio]
            )
    heads = ("problem", "peer", "family", "stages 1", "2", "3", "4")
    print(tabulate(stages_table, heads, floatfmt=".2f"), end="\n\n")
    heads = (
        "problem",
        "best of its family",
        "smem",
        "registers",
        "blocks/SM",
        "ms",
        "x SDPA",
        "x best",
    )
    print(tabulate(family_table, heads, floatfmt=(*[""] * 5, ".4f", ".2f", ".2f")), end="\n\n")
    print(tabulate(wins.most_common(), ("family", "buckets where it is the best of our own")))


if __name__ == "__main__":
    main()
