"""What one call of `autofa.attention` costs the host beside plain SDPA, and where it goes.

    python benchmarks/call_overhead.py [--device cuda] [--rounds 61] [--threads 1] [--grad]

Interleaved rounds of back-to-back calls, medians. `own` is the default variant of the family that
serves the shape (built if missing) entered as the winner, `sdpa wins` plain SDPA entered as such.
With --grad the tensors require gradients; the backward is not run.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import autofa
from autofa import settings
from autofa.compiler import build
from autofa.dispatch import gradients, routes, shortcut, state
from autofa.dispatch.keys import device_index, key_of
from autofa.kernels import REGISTRY
from autofa.problem import Problem, parse_shape
from autofa.runtime import devices, extension, kernels
from autofa.runtime.abi import FLAG_LSE
from autofa.runtime.tensors import make_inputs

SHAPES = ("1,1,16,64", "1,8,16,64", "1,8,1/128,64", "1,8,128,64")
Call = Callable[[], object]


def measure(calls: dict[str, Call], rounds: int, batch: int) -> dict[str, float]:
    """Median nanoseconds per call of each; every round runs all of them once."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 3):
        for name, call in calls.items():
            start = time.perf_counter_ns()
            for _ in range(batch):
                call()
            elapsed = (time.perf_counter_ns() - start) / batch
            if round_ >= 3:  # the first rounds warm up
                samples[name].append(elapsed)
    return {name: statistics.median(values) for name, values in samples.items()}


def own_kernel(problem: Problem, device: torch.device) -> tuple[str, int] | None:
    """Slug and id of the first family's default variant; None where no family serves it."""
    limits = devices.limits(device)
    for family in REGISTRY.families:
        variant = family.default_variant(problem, limits)
        if variant is not None and variant.refusal(problem, limits) is None:
            result = build([(variant, variant.target(limits))], settings.load())[0]
            if result.library is not None:
                return variant.slug, kernels.load(variant, result.library)
            print(f"{variant}: {result.message}")
    return None


def stages(device: torch.device, rounds: int) -> None:
    """The questions of the direct path one by one."""
    query = torch.randn(1, 1, 16, 64, device=device)
    tensor = torch.Tensor
    empty = query[:, :, :0]
    fwd = state.STATE.fwd
    overload = torch.ops.autofa.fwd.default
    calls: dict[str, Call] = {
        "(empty loop body)": lambda: None,
        "type(x) is Tensor": lambda: type(query) is tensor,
        "torch.is_grad_enabled()": torch.is_grad_enabled,
        "any autocast": torch._C._is_any_autocast_enabled,
        "torch function mode": torch._C._is_torch_function_mode_enabled,
        "functorch": torch._C._functorch.peek_interpreter_stack,
        "deterministic": torch._C._get_deterministic_algorithms,
        "tracing": torch.compiler.is_dynamo_compiling,
        "x.shape": lambda: query.shape,
        "why_sdpa (the slow branch)": lambda: routes.why_sdpa(query, query, query, None, 0.0),
        "operator, raw, no rows": lambda: fwd(empty, query, query, None, False, None, False),
        "operator, OpOverload, no rows": lambda: overload(empty, query, query),
    }
    print("| stage | ns |\n|---|---:|")
    for name, value in measure(calls, rounds, 2000).items():
        print(f"| {name} | {value:.0f} |")


def compare(shape: str, device: torch.device, rounds: int, grad: bool) -> None:
    """One row: plain SDPA, and attention with either winner."""
    dtype = "f32" if device.type == "cpu" else "f16"
    problem = parse_shape(shape, dtype=dtype, device=device.type)
    inputs = [tensor.requires_grad_(grad) for tensor in make_inputs(problem, device, 0)]
    own = own_kernel(problem, device)
    flags = extension.flags() | FLAG_LSE * grad
    key = key_of(problem, device_index(device), graph=False, flags=flags)

    def enter(kernel: int) -> None:
        extension.table_set(key, kernel)
        shortcut.forget()
        gradients.forget()

    def attend() -> object:
        return autofa.attention(*inputs)

    # Both winners in the same rounds would swap the table all the time, so two sets of rounds.
    found = []
    if not grad:
        shortcut.sdpa_won()
    for kernel in (None if own is None else own[1], kernels.SDPA):
        if kernel is None:
            found.append((float("nan"), float("nan")))
            continue
        enter(kernel)
        times = measure({"sdpa": lambda: sdpa(*inputs), "attention": attend}, rounds, 200)
        found.append((times["sdpa"], times["attention"]))
    (base, fast), (other, slow) = found
    name = "-" if own is None else own[0]
    print(
        f"| {shape} {dtype} | {base / 1e3:.2f} | {fast / 1e3:.2f} | {fast / base:.2f} "
        f"| {other / 1e3:.2f} | {slow / 1e3:.2f} | {slow / other:.2f} | {name} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--grad", action="store_true", help="grad mode on, and needed")
    parser.add_argument("--shape", action="append", help=f"default: {' '.join(SHAPES)}")
    args = parser.parse_args()
    # glibc may hand the top of the heap back after every call and take it again at the next, which
    # adds 20 us to some calls and not to others, whoever makes them.
    ctypes.CDLL(None).mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
    if args.threads:
        torch.set_num_threads(args.threads)
    device = devices.find_device(args.device)
    mode = "on" if args.grad else "off"
    print(f"{devices.device_key(device)}, torch {torch.__version__}, grad mode {mode}")
    autofa.attention(*(torch.ones(1, 1, 1, 8, device=device),) * 3)  # loads the operator
    with torch.set_grad_enabled(args.grad):
        if not args.grad:
            stages(device, args.rounds)
        print(
            "\n| shape | sdpa us | own us | ratio | sdpa us | sdpa wins us | ratio | own kernel |"
            "\n|---|---:|---:|---:|---:|---:|---:|---|"
        )
        for shape in args.shape or SHAPES:
            compare(shape, device, args.rounds, args.grad)


if __name__ == "__main__":
    main()
