"""What the conformance suite shares: every kernel there is, by name, and how a call is judged.

A kernel is `attention` itself, another library's, or a family by its default variant for the call
(on CPU for each instruction set that is here). Families come from the registry, so a new one is
covered as it is. What a kernel's declaration covers must be served and right; for the rest the
forced call must say so, and `attention` must be right all the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cpu_variants import machines
from runtime_variants import require_runtime
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import autofa
from autofa import compiler
from autofa.bench.exact import Call, Truth
from autofa.device import Limits
from autofa.dispatch import state
from autofa.dispatch.fake import output_sizes, output_strides
from autofa.errors import NotApplicableError
from autofa.kernels import REGISTRY
from autofa.kernels.family import KernelFamily, Variant
from autofa.kernels.vendor import BASELINE
from autofa.problem import Problem
from autofa.runtime import devices, extension
from autofa.runtime.tensors import problem_of, sdpa_only

TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ATTENTION = "attention"


class NotBuilt(NotApplicableError):
    """A default that the cache of libraries has not, where none is compiled: on a GPU."""


@dataclass(frozen=True)
class Subject:
    """One kernel on one device.

    Attributes:
        name: `attention`, a slug of another library's kernel, or a family, `cpu.flash`.
        level: of the CPU, where that is not its own: its plain limits are used.
    """

    name: str
    device: str
    level: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.name, self.level, self.device)))

    @property
    def family(self) -> KernelFamily | None:
        return next((f for f in REGISTRY.families if f.name == self.name), None)

    @property
    def limits(self) -> Limits:
        own = devices.limits(torch.device(self.device))
        if not self.level:
            return own
        return next(limits for limits in machines() if limits.arch == self.level)

    def problem(self, call: Call) -> Problem | None:
        """The call as kernels know it; None if none but torch.sdpa may serve it."""
        rest = (call.attn_mask, call.is_causal, call.enable_gqa)
        tensors = (call.query, call.key, call.value)
        if sdpa_only(*tensors, *rest) is not None:
            return None
        return problem_of(*tensors, *rest, lower_right=call.lower_right)

    def slug(self, call: Call) -> str | None:
        """What to force; None: nothing.

        Raises:
            NotApplicableError: the family has no variant for the call, or none that is built.
        """
        if self.name == ATTENTION:
            return None
        family = self.family
        if family is None:
            return self.name
        problem = self.problem(call)
        variant = None if problem is None else family.default_variant(problem, self.limits)
        if variant is None:
            raise NotApplicableError(f"{family.name} declares that it does not serve this call")
        return self._built(variant)

    def _built(self, variant: Variant) -> str:
        target = variant.target(self.limits)
        if self.device == "cuda" and compiler.library_of(variant, target, _settings()) is None:
            raise NotBuilt(f"{variant.slug} is not in the cache of libraries")
        return variant.slug

    @property
    def on_its_machine(self):  # type: ignore[no-untyped-def]
        """While it is entered, the CPU is one of that level."""
        return _limited(self.limits) if self.level else nullcontext()


def _settings():  # type: ignore[no-untyped-def]
    state.start()
    return state.STATE.settings


@contextmanager
def _limited(limits: Limits) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "limits", lambda device: limits)
        yield


def _subjects(device: str) -> list[Subject]:
    found = [Subject(ATTENTION, device)]
    for vendor in REGISTRY.vendors:
        if vendor.version() is not None and any(d.device == device for d in vendor.domains):
            found.append(Subject(vendor.slug, device))
    own = [f.name for f in REGISTRY.families if f.domain.device == device]
    found += [Subject(name, device) for name in own]
    if device == "cpu" and machines():
        for limits in machines()[:-1]:
            for name in own:
                domain = next(f for f in REGISTRY.families if f.name == name).domain
                if domain.min_arch <= limits.capability <= domain.max_arch:
                    found.append(Subject(name, device, limits.arch))
    return found


def _parameters(subjects: Sequence[Subject]) -> list[object]:
    marks = {"cpu": (), "cuda": (pytest.mark.gpu,)}
    return [pytest.param(s, id=str(s), marks=marks[s.device]) for s in subjects]


SUBJECTS = [*_subjects("cpu"), *_subjects("cuda")]
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
each_kernel = pytest.mark.parametrize("kernel", _parameters(SUBJECTS))
each_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is known of any call yet; one thread, as the references are many small steps."""
    require_runtime()
    state.reload()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def randn(*shape: int, device: str = "cpu", dtype: str = "f32", seed: int = 0) -> Tensor:
    """Standard normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed * 1009 + sum(shape))
    return torch.randn(shape, generator=generator).to(TORCH[dtype]).to(device)


def inputs(
    device: str,
    query: tuple[int, ...],
    key: tuple[int, ...] | None = None,
    head_dim_v: int | None = None,
    dtype: str = "f32",
) -> tuple[Tensor, Tensor, Tensor]:
    """Query of shape `query`; key of shape `key` (the query's), value of that and `head_dim_v`."""
    key = query if key is None else key
    value = key if head_dim_v is None else (*key[:-1], head_dim_v)
    shapes = (query, key, value)
    q, k, v = (randn(*s, device=device, dtype=dtype, seed=i) for i, s in enumerate(shapes))
    return q, k, v


def dtypes_of(kernel: Subject) -> tuple[str, ...]:
    """The dtypes to test it in: all that its declaration has, at most two for `attention`."""
    family = kernel.family
    if family is not None:
        return family.domain.dtypes
    return ("f32", "bf16") if kernel.device == "cpu" else ("f32", "f16")


def attend(call: Call, **options: bool) -> Any:
    """`autofa.attention` as a user writes the call."""
    mask, causal = call.attn_mask, call.is_causal
    if call.lower_right:
        causal = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of NaN in rows with nothing to attend to
            mask = causal_lower_right(call.query.shape[-2], call.key.shape[-2])
    arguments = {"is_causal": causal, "scale": call.scale, "enable_gqa": call.enable_gqa}
    arguments |= options
    return autofa.attention(call.query, call.key, call.value, mask, **arguments)  # type: ignore[arg-type]


def forced(kernel: Subject, call: Call, **options: bool) -> Any:
    """The call by this kernel.

    Raises:
        NotApplicableError: it does not serve the call.
    """
    with kernel.on_its_machine:
        slug = kernel.slug(call)
        with nullcontext() if slug is None else autofa.force_kernel(slug):
            return attend(call, **options)


def assert_right(out: Tensor, truth: Truth, *, fast: bool = False, own: bool = True) -> None:
    """Close to float64, and laid out as every kernel's outputs are."""
    wrong = truth.wrong(out, fast=fast, masks_values=own)
    assert wrong is None, wrong
    call = truth.call
    sizes = output_sizes(call.query, call.key, call.value, call.enable_gqa)
    strides = output_strides(sizes, call.query)
    got = [s for s, n in zip(out.stride(), out.shape, strict=True) if n > 1]
    want = [s for s, n in zip(strides, sizes, strict=True) if n > 1]
    assert got == want or not out.numel(), (out.stride(), strides)


def check(kernel: Subject, call: Call, repeats: int = 0) -> bool:
    """Judges the kernel's answer, or the unforced one where the kernel does not cover the call;
    `repeats` more calls give the same bits. Whether the kernel served it."""
    truth = Truth(call)
    accuracy = "f32"
    own = extension.counters()["own"]
    with torch.no_grad():
        refused = ""
        try:
            out = forced(kernel, call)
        except NotBuilt:
            return False
        except NotApplicableError as error:
            refused = str(error)
        if refused:
            assert kernel.name not in (ATTENTION, BASELINE), refused
            assert not _covered(kernel, call), f"{kernel} covers it, but: {refused}"
            assert_right(attend(call), truth, own=extension.counters()["own"] > own)
            return False
        slug = kernel.name
        if slug not in (ATTENTION, BASELINE) and kernel.family is None:
            accuracy = REGISTRY.candidate(slug).accuracy(truth.dtype)
        assert_right(out, truth, fast=accuracy != "f32", own=extension.counters()["own"] > own)
        for _ in range(repeats):
            again = forced(kernel, call)
            assert torch.equal(again.nan_to_num(1e9), out.nan_to_num(1e9)), "other bits"
    return True


def _covered(kernel: Subject, call: Call) -> bool:
    """Whether a family declares that it serves the call."""
    family, problem = kernel.family, kernel.problem(call)
    if family is None or problem is None:
        return False
    aligned = family.domain.alignment <= call.query.element_size()
    return aligned and family.domain.refusal(problem, kernel.limits) is None


def gradients(out: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Of a weighted sum, so that no row's gradient vanishes by symmetry."""
    weights = torch.linspace(-1.0, 1.0, max(out.numel(), 1), device=out.device)[: out.numel()]
    total = (out.double() * weights.view(out.shape).double()).sum()
    return list(torch.autograd.grad(total, leaves))


def definition(call: Call) -> Tensor:
    """Differentiable attention in float64; rows that see nothing are 0 and pass no gradient."""
    q, k, v = call.expanded
    scores = q @ k.mT * call.factor
    seen = call.visible.expand(scores.shape)
    if call.attn_mask is not None and call.attn_mask.dtype != torch.bool:
        scores = scores + call.attn_mask.double().masked_fill(call.attn_mask == -torch.inf, 0.0)
    lowest = torch.finfo(torch.float64).min
    weights = scores.masked_fill(~seen, lowest).softmax(-1).masked_fill(~seen, 0.0)
    return weights @ v


def check_gradients(kernel: Subject, call: Call) -> bool:
    """The gradients by this kernel equal those of the definition; False if it gives none."""
    tensors = [t.detach().requires_grad_() for t in (call.query, call.key, call.value)]
    leaf = replace(call, query=tensors[0], key=tensors[1], value=tensors[2])
    try:
        out = forced(kernel, leaf)
    except NotApplicableError:
        assert kernel.name not in (ATTENTION, BASELINE)
        return False
    mine = gradients(out, tensors)
    theirs = gradients(definition(leaf), tensors)
    unit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
    for got, want, leaf_tensor in zip(mine, theirs, tensors, strict=True):
        assert got.shape == leaf_tensor.shape
        assert bool(got.isfinite().all())
        if not got.numel():
            continue
        allowed = unit.get(got.dtype, 1e-9) * (1.0 + float(want.abs().max()))
        worst = float((got.double() - want.double()).abs().max())
        assert worst <= 4 * allowed, (worst, allowed)
    return True
