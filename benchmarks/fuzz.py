"""Random calls of attention, by every kernel that accepts them, against float64.

    python benchmarks/fuzz.py --device cpu --count 20000 --seed 1 [--kernel GLOB] [--seconds S]
    python benchmarks/fuzz.py --device cpu --case '{...}' --kernel cpu.flash-...

Each problem goes through `attention()` itself and, forced, through every kernel of another library,
each family's default and some other variants. Compiles nothing: variants are those that are built
already (`autofa build`). Checked are values and log-sum-exp, NaN that must stay hidden, output
strides, that inputs are left alone, and the same bits on a second call. A disagreement is printed
with the command that repeats it. Exit code 1 if there was one, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch

import torch
from fuzz_problems import Spec, draw, make
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import autofa
from autofa import compiler, settings
from autofa.bench.exact import Call, Truth
from autofa.dispatch.fake import output_sizes, output_strides
from autofa.errors import AutofaError, NotApplicableError
from autofa.kernels import REGISTRY
from autofa.kernels.family import KernelFamily, Variant
from autofa.kernels.vendor import BASELINE
from autofa.problem import Problem
from autofa.runtime import devices, extension
from autofa.runtime.tensors import problem_of, sdpa_only

UNFORCED = "attention"
_MOST_SHOWN = 20
_OTHERS = 2  # variants beside the default, of each family


@dataclass
class Tally:
    """What became of the calls of each kernel family or other library's kernel."""

    problems: int = 0
    served: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


class Kernels:
    """The kernels at hand on a device."""

    def __init__(self, device: str, glob: str) -> None:
        self.glob = glob
        self.limits = devices.limits(torch.device(device))
        here = settings.load()
        self.vendors = [
            v.slug
            for v in REGISTRY.vendors
            if v.version() is not None and any(d.device == device for d in v.domains)
        ]
        found = map(REGISTRY.find, sorted(compiler.slugs_built(here)))
        self.variants = [
            variant
            for variant in found
            if isinstance(variant, Variant)
            and variant.family.domain.device == device
            and compiler.library_of(variant, variant.target(self.limits), here) is not None
        ]
        self.slugs = {variant.slug for variant in self.variants}
        self.by_kind: dict[tuple[object, ...], list[Variant]] = {}
        for v in self.variants:
            kind = (v.family.name, v.dtype, v.head_dim, v.mask)
            self.by_kind.setdefault(kind, []).append(v)

    @staticmethod
    def _kind(family: KernelFamily, problem: Problem) -> tuple[object, ...]:
        """What of a problem is compiled into the family's variants."""
        compiled_in = ("dtype", "head_dim", "mask")
        values = (getattr(problem, n) if n in family.specialised else None for n in compiled_in)
        return (family.name, *values)

    @property
    def head_dims(self) -> list[int]:
        """Those that variants are compiled for, each as often as variants have it."""
        chosen = [v for v in self.variants if fnmatch(v.slug, self.glob) or self.glob == UNFORCED]
        return [v.head_dim for v in chosen if v.head_dim is not None]

    def of(self, call: Call, rng: random.Random) -> Iterator[str]:
        """What to try on a call, `attention()` itself first."""
        wanted = [UNFORCED, *self.vendors, *self._own(call, rng)]
        yield from (slug for slug in wanted if fnmatch(slug, self.glob))

    def _own(self, call: Call, rng: random.Random) -> Iterator[str]:
        rest = (call.attn_mask, call.is_causal, call.enable_gqa)
        if sdpa_only(call.query, call.key, call.value, *rest) is not None:
            # One is enough to see that it says so.
            yield from (v.slug for v in self.variants[:1])
            return
        problem = problem_of(call.query, call.key, call.value, *rest, lower_right=call.lower_right)
        for family in REGISTRY.families:
            default = family.default_variant(problem, self.limits)
            if default is not None and default.slug in self.slugs:
                yield default.slug
            same_kind = self.by_kind.get(self._kind(family, problem), ())
            others = [
                v.slug
                for v in same_kind
                if v != default and v.refusal(problem, self.limits) is None
            ]
            yield from rng.sample(others, min(_OTHERS, len(others)))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))


def _attend(call: Call, **options: bool) -> Tensor:
    mask: Tensor | None = call.attn_mask
    causal = call.is_causal
    if call.lower_right:
        causal = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of NaN in rows with nothing to attend to
            mask = causal_lower_right(call.query.shape[-2], call.key.shape[-2])
    return autofa.attention(
        call.query,
        call.key,
        call.value,
        mask,
        is_causal=causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
        **options,
    )


def _family(slug: str) -> str:
    candidate = None if slug == UNFORCED else REGISTRY.find(slug)
    return slug if candidate is None else candidate.family_name


def _wrong_layout(call: Call, out: Tensor) -> str | None:
    sizes = output_sizes(call.query, call.key, call.value, call.enable_gqa)
    strides = output_strides(sizes, call.query)
    got = [s for s, n in zip(out.stride(), out.shape, strict=True) if n > 1]
    want = [s for s, n in zip(strides, sizes, strict=True) if n > 1]
    if got == want or not out.numel():
        return None
    return f"strides {out.stride()} instead of {tuple(strides)}"


def _try(slug: str, call: Call, truth: Truth, times: int, with_lse: bool) -> str | None:
    """What is wrong with one kernel's answers, if anything is.

    Raises:
        NotApplicableError: it does not serve the call.
    """
    candidate = None if slug == UNFORCED else REGISTRY.candidate(slug)
    accuracy = (
        "f32" if candidate is None or truth.dtype == "f64" else candidate.accuracy(truth.dtype)
    )
    fast = accuracy != "f32"
    first: Tensor | None = None
    for turn in range(times + with_lse):
        before = extension.counters()["own"]
        lse: Tensor | None = None
        try:
            with nullcontext() if candidate is None else autofa.force_kernel(slug):
                if turn < times:
                    out = _attend(call)
                else:
                    out, lse = _attend(call, return_lse=True)
            if out.is_cuda:
                torch.cuda.synchronize()  # or an error shows in the comparison
        except NotApplicableError:
            if candidate is None or slug == BASELINE:
                return "refused a valid call"
            if turn == times:
                return None  # it has no log-sum-exp to give
            raise
        except (AutofaError, RuntimeError, ValueError, TypeError) as error:
            return f"raised {type(error).__name__}: {str(error).splitlines()[0]}"
        own = extension.counters()["own"] > before
        wrong = truth.wrong(out, fast=fast, masks_values=own) or _wrong_layout(call, out)
        if wrong is None and lse is not None:
            wrong = truth.wrong_lse(lse, fast=fast, masks_values=own)
        if wrong is not None:
            return wrong if turn < times else f"with return_lse: {wrong}"
        if isinstance(candidate, Variant) and first is not None and not _same(first, out):
            return "two calls on the same input differ"
        first = out
    return None


class Fuzz:
    def __init__(self, device: str, kernels: Kernels) -> None:
        self.device = device
        self.kernels = kernels
        self.tally = Tally()
        self.threads = torch.get_num_threads()
        self.broken = False

    def one(self, spec: Spec) -> bool:
        """Runs a problem by every kernel; whether all agreed."""
        torch.set_num_threads(1)  # the reference is many small steps
        call = make(spec, self.device)
        tensors = [t for t in (call.query, call.key, call.value, call.attn_mask) if t is not None]
        kept = [t.clone() for t in tensors]
        with torch.no_grad():
            truth = Truth(call)
            self.tally.problems += 1
            agreed = True
            for slug in self.kernels.of(call, random.Random(spec.seed)):
                name = _family(slug)
                torch.set_num_threads(self.threads if spec.seed % 8 == 0 else 1)
                try:
                    times = 2 if slug == UNFORCED or spec.seed % 4 == 0 else 1
                    wrong = _try(slug, call, truth, times, spec.seed % 3 == 0)
                except NotApplicableError:
                    self.tally.refused[name] += 1
                    continue
                self.tally.served[name] += 1
                if wrong is None and not all(map(_same, tensors, kept)):
                    wrong = "wrote to its inputs"
                if wrong is not None:
                    agreed = False
                    self.tally.failed[name] += 1
                    if self.tally.failed.total() <= _MOST_SHOWN:
                        self._show(spec, slug, wrong)
                    if "CUDA error" in wrong:  # no call of this process succeeds any more
                        self.broken = True
                        return False
        return agreed

    def _show(self, spec: Spec, slug: str, wrong: str) -> None:
        print(f"DISAGREES {slug}: {wrong}")
        print(
            f"  python benchmarks/fuzz.py --device {self.device} --kernel {slug} "
            f"--case '{spec.to_json()}'",
            flush=True,
        )

    def report(self, seconds: float) -> None:
        tally = self.tally
        for name in sorted({*tally.served, *tally.refused}):
            print(
                f"{name:18} {tally.served[name]:7} served {tally.refused[name]:7} refused "
                f"{tally.failed[name]:5} disagree"
            )
        print(
            f"{tally.problems} problems, {tally.served.total()} by a kernel, "
            f"{tally.failed.total()} disagreements, {seconds:.1f} s"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernel", default="*", metavar="GLOB", help="slugs; attention: unforced")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--case", metavar="JSON", help="this problem only")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda; supported: cpu, as torch sees no CUDA GPU here")
    kernels = Kernels(options.device, options.kernel)
    fuzz = Fuzz(options.device, kernels)
    started = time.monotonic()
    if options.case is not None:
        fuzz.one(Spec.from_json(options.case))
    else:
        rng = random.Random(options.seed)
        head_dims = kernels.head_dims
        for _ in range(options.count):
            if fuzz.broken or time.monotonic() - started > options.seconds:
                break
            fuzz.one(draw(rng, options.device, head_dims))
    fuzz.report(time.monotonic() - started)
    return 1 if fuzz.tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
