"""Sweeps of whole search spaces: recorded once, replayed by any search strategy without a device.

    python benchmarks/sweep.py record [DIR] --device cuda:0     # every point of the default spaces
    python benchmarks/sweep.py record [DIR] --space mma.split_q:1,8,1024,64:f16:none
    python benchmarks/sweep.py replay [DIR] --seeds 20

`record` checks and times each point by the tuner's own worker against plain SDPA, and goes on where
it stopped. `replay` lets every strategy search the recordings through `autofa.tuning.search`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from sweep_files import FOLDER, Space, read_all
from sweep_record import SPACES, record
from sweep_replay import arena, details, replay, table, verdict, warm
from sweep_strategies import STRATEGIES

from autofa.errors import AutofaError, UsageError, explain_bad
from autofa.tuning.request import parse_budget


def _space(text: str, device: str, without: list[str]) -> Space:
    family, shape, dtype, mask = text.split(":")
    return Space(family, shape, dtype, mask, device, tuple(without))


def _record(arguments: argparse.Namespace) -> int:
    kind = arguments.device.partition(":")[0]
    named = [_space(text, kind, arguments.without) for text in arguments.space]
    complete = record(
        named or [s for s in SPACES[kind] if arguments.family in (None, s.family)],
        arguments.folder / kind,
        arguments.device,
        rounds=arguments.rounds,
        budget_s=parse_budget(arguments.budget) if arguments.budget else None,
        build_only=arguments.build_only,
    )
    return 0 if complete else 3


def _replay(arguments: argparse.Namespace) -> int:
    found = [
        arena(path.stem, sweep, declared=arguments.declared)
        for path, sweep in read_all(arguments.folder)
    ]
    arenas = [
        replace(each, blind=arguments.blind)
        for each in found
        if each is not None and len(each.legal) >= arguments.points
    ]
    names = arguments.samplers.split(",") if arguments.samplers else list(STRATEGIES)
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown or not arenas:
        got = unknown[0] if unknown else f"no recording in {arguments.folder}"
        raise UsageError(explain_bad("samplers", got, ", ".join(STRATEGIES), "choose of these"))
    hints = {each.name: warm(each, arenas) for each in arenas} if arguments.warm else {}
    replays = replay(arenas, names, arguments.seeds, arguments.batch, hints)
    halves = (arenas[::2], arenas[1::2])
    for name, part in (("all", arenas), ("first half", halves[0]), ("second half", halves[1])):
        print(f"\n{name}: {len(part)} recordings, {arguments.seeds} seeds\n")
        print(table(replays, part))
    print()
    print(details(replays, arenas))
    print()
    for train, test in (halves, halves[::-1]):
        print(verdict(replays, train, test))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    recorder = commands.add_parser("record", help="measure every point of some spaces")
    recorder.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    recorder.add_argument("--device", default="cpu", metavar="cuda:0|cpu")
    recorder.add_argument("--space", action="append", default=[], metavar="FAMILY:SHAPE:DTYPE:MASK")
    recorder.add_argument("--without", action="append", default=[], help="a constraint to lift")
    recorder.add_argument("--family", help="of the default spaces only those of this family")
    recorder.add_argument("--rounds", type=int, default=41, help="samples per point")
    recorder.add_argument("--budget", metavar="90s|10m", help="stop after this; go on later")
    recorder.add_argument("--build-only", action="store_true", help="compile, measure nothing")
    recorder.set_defaults(run=_record)
    player = commands.add_parser("replay", help="compare search strategies on recordings")
    player.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    player.add_argument("--samplers", metavar="NAME,...", help=", ".join(STRATEGIES))
    player.add_argument("--seeds", type=int, default=20)
    player.add_argument("--batch", type=int, default=8, help="points asked for before one is told")
    player.add_argument("--points", type=int, default=9, help="only spaces of at least so many")
    player.add_argument("--blind", action="store_true", help="begin anywhere, not at the default")
    player.add_argument("--warm", action="store_true", help="with the best of other recordings")
    player.add_argument("--declared", action="store_true", help="only what a tune would search")
    player.set_defaults(run=_replay)
    arguments = parser.parse_args()
    try:
        return int(arguments.run(arguments))
    except AutofaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
