"""One kernel for every call of a context: for tests and benchmarks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

from autofa import compiler
from autofa.compiler import library_of
from autofa.dispatch import gradients, routes, state
from autofa.dispatch.ladder import Question, refusal
from autofa.errors import LaunchError, NotApplicableError
from autofa.kernels import REGISTRY, Candidate
from autofa.kernels.family import Variant
from autofa.runtime import devices, kernels
from autofa.runtime.backends import Call
from autofa.runtime.tensors import problem_of, sdpa_only, validate
from autofa.settings import Settings

Result = TypeVar("Result")

_slug: ContextVar[str | None] = ContextVar("autofa_forced", default=None)
_lock = threading.Lock()
_ids: dict[tuple[str, str], int] = {}


def forced() -> str | None:
    """The slug forced in this context, else the environment's, else None."""
    return _slug.get() or state.STATE.forced


@contextmanager
def force_kernel(slug: str) -> Iterator[None]:
    """Every `attention` call of this context (thread or task) uses the kernel `slug`.

    A library that is missing is built on first use. Calls outside the kernel's domain raise
    `NotApplicableError`, those that need dropout too (but for `torch.sdpa`), or gradients of a
    kernel that returns no log-sum-exp; calls inside a compiled graph keep the kernel they were
    looked up for.

    Raises:
        UsageError: no such kernel, on entry.
    """
    state.start()
    REGISTRY.candidate(slug)
    if state.STATE.off:
        raise NotApplicableError(
            f"kernel {slug} cannot be forced: {state.STATE.off}; supported: a working runtime "
            "library; `autofa doctor` says what is missing"
        )
    token = _slug.set(slug)
    state.enter_forcing(1)
    try:
        yield
    finally:
        state.enter_forcing(-1)
        _slug.reset(token)


def not_applicable(slug: str, reason: str) -> NotApplicableError:
    return NotApplicableError(
        f"forced kernel {slug}: got a call that it does not serve: {reason}; supported: what "
        "`autofa kernels` lists; drop force_kernel or change the call"
    )


def serving(slug: str, question: Question) -> Candidate:
    """The forced kernel.

    Raises:
        UsageError: no such kernel.
        NotApplicableError: it does not serve that question.
    """
    candidate = REGISTRY.candidate(slug)
    reason = refusal(candidate, question)
    if reason is not None:
        raise not_applicable(slug, reason)
    return candidate


def attend(slug: str, call: Call) -> Tensor:
    """The call with the kernel `slug`, with gradients where they are needed.

    Raises:
        UsageError: no such kernel; bad tensors.
        NotApplicableError: it does not serve this call.
    """
    if routes.need_gradients(*call[:3]):
        return _run(
            slug,
            call,
            lambda kernel: gradients.differentiable(_plan(slug, kernel, call), call),
            lse=True,
        )
    return _run(slug, call, lambda kernel: kernels.run(kernel, *call))


def attend_with_lse(slug: str, call: Call) -> tuple[Tensor, Tensor]:
    """As `attend`, with the log-sum-exp."""
    if routes.need_gradients(*call[:3]):
        return _run(
            slug, call, lambda kernel: gradients.with_lse(_plan(slug, kernel, call), call), lse=True
        )
    return _run(slug, call, lambda kernel: kernels.run_with_lse(kernel, *call), lse=True)


def _plan(slug: str, kernel: int, call: Call) -> gradients.Plan:
    plan = gradients.planned(kernel, call)
    if plan.kernel != kernel:
        raise not_applicable(slug, "there is nothing to compute")
    return plan


def _run(slug: str, call: Call, attend: Callable[[int], Result], *, lse: bool = False) -> Result:
    query, key, value, mask, causal, _, enable_gqa, lower_right = call
    validate(query, key, value, mask, causal, enable_gqa)
    reason = sdpa_only(query, key, value, mask, causal, enable_gqa)
    if reason is not None:
        raise not_applicable(slug, reason)
    problem = problem_of(query, key, value, mask, causal, enable_gqa, lower_right=lower_right)
    limits = devices.limits(query.device)
    device = devices.device_key(query.device)
    candidate = serving(slug, Question(problem, device, limits, precision="fast", needs_lse=lse))
    target = candidate.target(limits) if isinstance(candidate, Variant) else ""
    kernel = _id_of(candidate, target, state.STATE.settings)
    try:
        return attend(kernel)
    except (torch.OutOfMemoryError, NotApplicableError):
        raise
    except RuntimeError as error:
        # The arguments are valid: this kernel refused the very call, by its alignment for example.
        raise not_applicable(slug, str(error)) from error


def _id_of(candidate: Candidate, target: str, settings: Settings) -> int:
    with _lock:
        known = _ids.get((candidate.slug, target))
        if known is None:
            library = None
            if isinstance(candidate, Variant):
                library = library_of(candidate, target, settings)
                if library is None:
                    result = compiler.build([(candidate, target)], settings)[0]
                    if result.library is None:
                        raise LaunchError(f"{candidate} cannot be built: {result.message}")
                    library = result.library
            known = _ids[candidate.slug, target] = kernels.load(candidate, library)
        return known
