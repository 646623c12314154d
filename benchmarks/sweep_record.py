"""Measures every point of a space with the tuner's own worker, and records them as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sweep_files import Space, heading, lines, read

from autofa import settings
from autofa.bench.protocol import Plan
from autofa.kernels import REGISTRY
from autofa.kernels.family import Variant
from autofa.kernels.vendor import BASELINE
from autofa.store.rows import Row
from autofa.tuning.control import Control, Stopped, StopToken
from autofa.tuning.events import ignore
from autofa.tuning.hardware import open_lab
from autofa.tuning.lab import Lab
from autofa.tuning.request import TuneRequest
from autofa.tuning.steps import Steps

# Candidates timed together, in common rounds with plain SDPA.
_BATCH = 8

# What is recorded by default. On a GPU each family where its space is large, short and long; on a
# CPU the constraints that only keep slow points out are lifted, which makes 9 and 16
# points 39 and 32.
_FLASH = ("isa", "tile area")
_DECODE = ("isa",)
SPACES = {
    "cpu": (
        Space("cpu.flash", "1,8,512,64", "f32", "none", "cpu", _FLASH),
        Space("cpu.flash", "1,8,1024,128", "f32", "causal", "cpu", _FLASH),
        Space("cpu.flash", "4,8,128,64", "f32", "none", "cpu", _FLASH),
        Space("cpu.flash", "1,8,256,128", "f32", "causal", "cpu", _FLASH),
        Space("cpu.flash", "1,8,512,64", "bf16", "none", "cpu", _FLASH),
        Space("cpu.flash", "1,8,1024,128", "bf16", "causal", "cpu", _FLASH),
        Space("cpu.decode", "1,32/8,1/4096,128", "f32", "none", "cpu", _DECODE),
        Space("cpu.decode", "1,8,1/4096,64", "f32", "none", "cpu", _DECODE),
        Space("cpu.decode", "1,32/8,4/1024,128", "f32", "none", "cpu", _DECODE),
        Space("cpu.decode", "1,32/8,1/1024,128", "bf16", "none", "cpu", _DECODE),
        Space("cpu.amx", "1,8,512,64", "bf16", "none", "cpu"),
        Space("cpu.amx", "1,8,1024,128", "bf16", "causal", "cpu"),
    ),
    "cuda": (
        Space("hopper.split_q", "2,16,8192,64", "bf16", "causal", "cuda"),
        Space("hopper.split_q", "4,32,2048,128", "bf16", "causal", "cuda"),
        Space("hopper.split_q", "2,16,8192,192", "bf16", "causal", "cuda"),
        Space("mma.split_q", "1,8,1024,64", "f16", "none", "cuda"),
        Space("mma.share_kv", "8,32,2048,64", "f16", "causal", "cuda"),
        Space("mma.share_kv", "1,8,2048,160", "f16", "none", "cuda"),
        Space("mma.share_qkv", "1,8,1024,192", "f16", "none", "cuda"),
        Space("mma.split_kv", "1,32/8,1/4096,192", "f16", "none", "cuda"),
        Space("mma.tiling_qk", "1,32,4096,320", "f16", "none", "cuda"),
        Space("mma.tiling_qkv", "1,8,2048,256", "f16", "none", "cuda"),
    ),
}


def _file(folder: Path, space: Space, lab: Lab, mode: str) -> Path:
    """The space's recording, begun where there is none."""
    path = folder / f"{space.name}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        today = lab.today
        versions = {
            "mode": mode,
            "torch": today.torch,
            "driver": today.driver,
            "compiler": today.compiler,
            "fingerprint": lab.fingerprint(
                space.variants(lab.limits)[0], space.variants(lab.limits)[0].target(lab.limits)
            ),
        }
        path.write_text(heading(space, lab.device.name, lab.limits, versions), encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):  # killed in the middle of a line
        path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
    return path


def _measure(
    space: Space, left: Sequence[Variant], path: Path, lab: Lab, control: Control, plan: Plan
) -> None:
    default = space.variants(lab.limits)[0]
    peers = [REGISTRY.candidate(BASELINE), default]

    def keep(rows: Sequence[Row], final: bool) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(lines(rows, default.slug, plan.mode))

    steps = Steps(space.problem, lab, control, keep, ignore)
    rest = [v for v in left if v != default]
    for start in range(0, len(rest), _BATCH):
        control.check()
        batch = rest[start : start + _BATCH]
        # A check of the problem alone: a sweep is of speeds, and nothing of it is dispatched.
        entrants = steps.admitted([*peers, *batch], thorough=False)
        if entrants:
            steps.time(entrants, replace(plan, finalists=len(entrants)), final=False)


def record(
    spaces: Sequence[Space],
    folder: Path,
    device: str,
    *,
    rounds: int,
    budget_s: float | None,
    build_only: bool,
    tell: Callable[[str], None] = print,
) -> bool:
    """Measures what the recordings in `folder` lack; True where they are complete then."""
    request = TuneRequest((), device, "", settings=settings.load())
    plan = Plan(request.mode, 60.0, screen_rounds=rounds, min_rounds=rounds, max_rounds=rounds)
    control = Control(budget_s, StopToken())
    with open_lab(request) as lab:
        work = []
        for space in spaces:
            variants = space.variants(lab.limits)
            if not variants:
                tell(f"{space.name}: nothing is legal here")
                continue
            path = _file(folder, space, lab, request.mode)
            known = read(path).costs
            left = [v for v in variants if v.slug not in known]
            tell(f"{space.name}: {len(variants)} points, {len(left)} to measure")
            work.append((space, left, path))
        for _, left, _ in work:
            lab.builder.prefetch(left)
        try:
            if build_only or not lab.overlap:
                for space, left, _ in work:
                    built = lab.builder.take(left, control.check)
                    tell(f"{space.name}: {len(built)} compiled")
            for space, left, path in () if build_only else work:
                _measure(space, left, path, lab, control, plan)
                tell(f"{space.name}: recorded after {control.elapsed:.0f} s")
        except Stopped:
            tell("the budget is spent; the same command goes on")
            return False
    return True
