"""`cpu.amx`: what it promises beyond what every CPU family does (test_cpu_families.py)."""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpu_variants import Case, Library, assert_close, check, qkv, reference

from autofa import compiler, settings
from autofa.device import cpu_info, cpu_limits, named_limits
from autofa.kernels.families.cpu_amx import FAMILY as CPU_AMX
from autofa.problem import EXPLICIT_MASKS, MASKS, parse_shape
from autofa.runtime import abi

V4 = named_limits("x86-64-v4")
V4_AMX = replace(V4, features=frozenset({"amx_bf16"}))

# Calls a variant as a thread would that is using tiles itself.
CALLER = """
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
extern "C" int same_settings(int32_t (*launch)(const void*, const void*, void*),
                             const void* params, const void* executor, int in_use) {
  alignas(64) uint8_t before[64] = {1}, after[64];
  before[16] = 32, before[48] = 5;  // tile 0: 5 rows of 32 bytes
  if (in_use) {
    asm volatile("ldtilecfg %0" : : "m"(before) : "memory");
  } else {
    asm volatile("tilerelease" : : : "memory");
    memset(before, 0, 64);
  }
  const unsigned control = 0x1f80;  // what threads start with
  _mm_setcsr(control);
  const int code = launch(params, executor, nullptr);
  asm volatile("sttilecfg %0" : "=m"(after) : : "memory");
  asm volatile("tilerelease" : : : "memory");
  return code == 0 && memcmp(before, after, 64) == 0 && (_mm_getcsr() & ~0x3fu) == control;
}
"""


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["cpu.amx-q128k64-bf16", "cpu.amx-q32k256-bf16"])
def library(request: pytest.FixtureRequest, session_cache: Path) -> Library:
    if "amx_bf16" not in cpu_info().features:
        pytest.skip("this CPU has no AMX-BF16")
    variant = CPU_AMX.parse(request.param)
    assert variant is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOFA_CACHE_DIR", str(session_cache))
        return Library(variant, cpu_limits())


@pytest.mark.parametrize("mask", MASKS)
def test_keys_beyond_the_cache(library: Library, mask: str) -> None:
    """Units of a panel then take turns."""
    assert check(library, random.Random(mask), Case(100, 2100, 256, 256, 1, 1, 1), mask)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_scores_that_keep_growing(library: Library, mask: str) -> None:
    """Outputs are rescaled in the middle of what is being added to them."""
    q, k, v = qkv(library, random.Random(1), Case(70, 500, 32, 80))
    q, k = q.abs(), (k.abs() * torch.linspace(0.1, 20, 500).view(-1, 1)).to(k.dtype)
    lse = torch.empty(q.shape[:3])
    out = library.attend((q, k, v), mask=mask, lse=lse)
    right, right_lse, magnitude = reference((q, k, v), mask)
    assert_close(library, out, right, magnitude)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=3e-4)


@pytest.mark.parametrize("mask", ["none", "causal", "additive"])
@pytest.mark.parametrize("tiny", [1e-39, 1e-30])
def test_tiny_scales_weigh_all_alike(library: Library, mask: str, tiny: float) -> None:
    for scale in (tiny, -tiny):
        assert check(library, random.Random(2), Case(40, 70, scale=scale), mask)


@pytest.mark.parametrize("mask", ["causal", *EXPLICIT_MASKS])
def test_one_special_value_among_hidden_ones(library: Library, mask: str) -> None:
    """The keys of its group are weighed one by one; those before and after it are not."""
    rng = random.Random(3)
    case = Case(90, 300, 32, 32, 1, 1, 1)
    q, k, v = qkv(library, rng, case)
    v = v.clone()
    place = 40
    v[:, :, place, 5] = float("nan")
    attn_mask = None
    if mask in EXPLICIT_MASKS:
        visible = torch.rand(1, 1, 90, 300) < 0.7
        visible[..., :20, place] = False
        attn_mask = visible
        if mask == "additive":
            attn_mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    right, _, magnitude = reference((q, k, v), mask, None, attn_mask)
    assert right[:, :, :20].isfinite().all()
    assert right.isnan().any()
    out = library.attend((q, k, v), mask=mask, attn_mask=attn_mask)
    assert_close(library, out, right, magnitude)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_same_bits_on_any_number_of_threads(library: Library, mask: str) -> None:
    torch.set_num_threads(3)
    for case in (Case(150, 150, 64, 64), Case(300, 3100, 160, 200, 1, 1, 1)):
        tensors = qkv(library, random.Random(6), case)
        first = library.attend(tensors, mask=mask)
        for threads in (2, 3, 7):
            assert torch.equal(library.attend(tensors, threads, mask=mask), first)


@pytest.mark.parametrize("in_use", [True, False])
def test_the_callers_settings_come_back(library: Library, in_use: bool, tmp_path: Path) -> None:
    source, built = tmp_path / "caller.cpp", tmp_path / "caller.so"
    source.write_text(CALLER)
    command = compiler.find("cpu", settings.load()).command
    subprocess.run([*command, "-shared", "-fPIC", "-o", built, source], check=True)
    tensors = qkv(library, random.Random(7), Case(40, 70))
    out = torch.empty((*tensors[2].shape[:2], 40, 24), dtype=library.torch_dtype)
    params = library.params(tensors, out)
    size = library.workspace_bytes(ctypes.addressof(params))
    workspace = torch.empty(size, dtype=torch.uint8)
    params.workspace = workspace.data_ptr()
    launch = ctypes.cast(library.launch, ctypes.c_void_p)
    executor = abi.Executor(None, 1)
    same = ctypes.CDLL(str(built)).same_settings
    assert same(launch, ctypes.byref(params), ctypes.byref(executor), int(in_use)) == 1


def test_without_a_workspace_nothing_is_written(library: Library) -> None:
    tensors = qkv(library, random.Random(10), Case(4, 4, 8, 8))
    out = torch.full((2, 2, 4, 8), 7.0, dtype=library.torch_dtype)
    params, executor = library.params(tensors, out), abi.Executor(None, 1)
    code = library.launch(ctypes.addressof(params), ctypes.addressof(executor), None)
    assert code == abi.NO_MEMORY
    assert (out == 7).all()


def test_it_is_legal_only_where_tiles_of_bf16_are() -> None:
    problem = parse_shape("1,8,512,64", dtype="bf16", device="cpu")
    assert 4 <= len(CPU_AMX.legal(problem, V4_AMX)) <= 12
    assert CPU_AMX.legal(problem, V4) == []
    assert "AMX" in (CPU_AMX.domain.refusal(problem, V4) or "")
    assert CPU_AMX.legal(replace(problem, dtype="f16"), V4_AMX) == []


@pytest.mark.parametrize(
    ("shape", "mask", "expected"),
    [
        ("1,8,512,64", "none", True),
        ("1,8,32/4096,256", "causal", True),
        ("1,8,16,64", "bool", True),
        ("1,8,512,256", "bool", True),
        ("1,8,512,256", "additive", False),
        ("1,8,512,320", "none", False),
        ("1,8,16/4096,64", "none", False),
        ("1,8,8/64,64", "none", False),
        ("1,8,1/4096,64", "none", False),
    ],
)
def test_answers_unmeasured_only_where_it_was_clearly_faster(
    shape: str, mask: str, expected: bool
) -> None:
    problem = parse_shape(shape, dtype="bf16", mask=mask, device="cpu")
    assert CPU_AMX.unmeasured(problem, V4_AMX) is expected
