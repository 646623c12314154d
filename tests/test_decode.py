"""mma.decode: what the tests of all CUDA families leave out. Keys that are split over thread
blocks, grouped heads as rows, parts that see nothing; its plans; where its domain ends."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import cuda_variants
import pytest
import torch
from cuda_variants import Case

from autofa import compiler, settings
from autofa.device import cuda_limits
from autofa.kernels.families.decode import FAMILY
from autofa.kernels.family import Variant
from autofa.problem import MASKS, Problem
from autofa.resources import csrc_dir
from autofa.runtime import abi

H200 = cuda_limits("sm_90a", 132)
# The emulator has three SMs, so that these keys are split three times, or twice. Under the masks
# some parts see nothing, and some rows less than others; tiles and parts are not whole.
SPLIT = (
    Case("one query", 1, 1, 1, 700, growing=True),
    Case("a group", 6, 1, 1, 523, layout="bnhd", scale=-0.7),
    Case("some queries", 4, 1, 3, 610, layout="gaps", spoiled=True),
    Case("row blocks", 10, 2, 5, 411, scale=0.0),
    Case("two sequences", 2, 1, 2, 470, batch=2),
)


def variant(text: str) -> Variant:
    found = FAMILY.parse(f"{FAMILY.name}-{text}")
    assert found is not None
    assert found.head_dim is not None
    problem = Problem("bf16", 1, 8, 1, 8, 4096, found.head_dim, found.head_dim, str(found.mask))
    assert FAMILY.broken(found.params, problem, H200) is None
    return found


def splits(library: ctypes.CDLL, heads: tuple[int, int], rows: int, keys: int, dim: int) -> float:
    """Partial results of a row, by the workspace that a causal call in f16 asks for."""
    params = abi.Params(
        struct_bytes=ctypes.sizeof(abi.Params),
        dtype=abi.DTYPE_CODES["f16"],
        causal=abi.CAUSAL_CODES["causal"],
        device_index=-1,
        batch=1,
        heads_q=heads[0],
        heads_kv=heads[1],
        seqlen_q=rows,
        seqlen_k=keys,
        head_dim=dim,
        head_dim_v=dim,
    )
    library.autofa_workspace_bytes.restype = ctypes.c_int64
    size = library.autofa_workspace_bytes(ctypes.byref(params))
    return float(size / 4 / (dim + 1) / (heads[0] * rows))


@pytest.mark.parametrize(
    "text",
    [
        "d64-m16n64-k4-c1-s2-f16-causal",
        "d128-m32n32-k2-c2-s3-bf16-causal_lower_right",
        "d320-m16n16-k1-c4-s2-f16-additive",
        "d232-m32n16-k1-c8-s3-bf16-bool",
    ],
)
def test_split_keys_on_the_emulator(text: str, tmp_path: Path) -> None:
    cuda_variants.check_emulated(variant(text), tmp_path, *SPLIT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "d8-m16n256-k8-c1-s3-f16-causal",
        "d72-m16n128-k4-c1-s2-bf16-causal",
        "d256-m16n128-k4-c2-s1-f16-causal_lower_right",
        "d512-m32n16-k1-c8-s3-bf16-none",
        "d648-m16n16-k1-c8-s2-f16-causal",
        "d1024-m16n16-k1-c8-s3-bf16-causal_lower_right",
    ],
)
def test_more_split_keys_on_the_emulator(text: str, tmp_path: Path) -> None:
    cuda_variants.check_emulated(variant(text), tmp_path, *SPLIT, *cuda_variants.CASES)


def test_keys_are_split_until_every_multiprocessor_has_work(tmp_path: Path) -> None:
    library = cuda_variants.emulated(variant("d64-m16n64-k4-c1-s2-f16-causal"), tmp_path)
    assert splits(library, (1, 1), 1, 6000, 64) == 3
    assert splits(library, (16, 1), 1, 6000, 64) == 3  # a group's rows are one tile
    assert splits(library, (2, 2), 1, 6000, 64) == 3  # two full waves
    assert splits(library, (3, 3), 1, 6000, 64) == 0
    assert splits(library, (17, 1), 1, 6000, 64) == 3  # two tiles of rows
    assert splits(library, (1, 1), 1, 100, 64) == 0  # two parts would cost more than they save


@pytest.fixture(scope="module")
def rule(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """`launch.cuh` alone, as the host compiles it."""
    folder, root = tmp_path_factory.mktemp("rule"), csrc_dir()
    source, library = folder / "rule.cpp", folder / "rule.so"
    source.write_text("""#include "kernels/decode/launch.cuh"
extern "C" int splits(long rows, long keys, int block_n, int processors, int each, int buffers) {
  const int enough = processors * autofa::decode::enough_blocks(each, buffers);
  return autofa::decode::choose_splits(rows, keys, block_n, processors * each, enough);
}
""")
    command = compiler.find("cpu", settings.load()).command
    includes = [f"-I{place}" for place in (cuda_variants.EMULATOR, root, root / "include")]
    flags = ("-std=c++17", "-O1", "-shared", "-fPIC", "-w")
    subprocess.run([*command, *flags, *includes, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize(
    ("row_blocks", "keys", "block_n", "each", "buffers", "splits"),
    [
        (8, 4096, 64, 2, 104448, 16),  # as fast with a block per SM as with two
        (8, 8192, 16, 2, 104448, 16),
        (64, 8192, 64, 2, 104448, 2),
        (128, 4096, 64, 2, 104448, 1),
        (8, 2048, 64, 2, 110592, 16),
        (32, 16384, 16, 2, 73728, 8),  # too little on the way for one block alone
        (8, 16384, 16, 2, 77824, 33),
        (8, 512, 64, 2, 104448, 8),  # a tile each
        (512, 1024, 64, 2, 104448, 1),  # enough without splitting
        (140, 8192, 64, 2, 104448, 1),  # all run at once, and read as fast as they can
        (140, 8192, 64, 1, 139264, 6),  # else a second wave would be of 8 blocks
        (100, 8192, 128, 1, 139264, 5),  # evens out the last wave
        (1, 64, 64, 2, 104448, 1),
    ],
)
def test_keys_are_split_as_far_as_that_is_faster(
    rule: ctypes.CDLL,
    row_blocks: int,
    keys: int,
    block_n: int,
    each: int,
    buffers: int,
    splits: int,
) -> None:
    """On 132 SMs; the first seven were the fastest of those measured on an H200."""
    found = rule.splits(ctypes.c_long(row_blocks), ctypes.c_long(keys), block_n, 132, each, buffers)
    assert found == splits


def test_nan_among_the_keys_seen_is_a_nan(tmp_path: Path) -> None:
    """Of one part of the keys only: it must survive being added up."""
    library = cuda_variants.emulated(variant("d64-m16n64-k4-c1-s2-f16-none"), tmp_path)
    torch.manual_seed(0)
    q = torch.randn(1, 2, 1, 64, dtype=torch.float16)
    k, v = (torch.randn(1, 1, 600, 64, dtype=torch.float16) for _ in range(2))
    q[0, 1, 0, 3] = torch.nan
    v[0, 0, 599, 7] = torch.inf
    out = torch.empty_like(q)
    lse = torch.empty(1, 2, 1)
    assert cuda_variants.launch(library, "none", (q, k, v, out), lse) == abi.OK
    assert out[0, 1].isnan().all()
    assert lse[0, 1].isnan().all()
    assert (~out[0, 0].isfinite()).nonzero().tolist() == [[0, 7]]
    assert lse[0, 0].isfinite().all()


@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "rows", "served"),
    [
        (8, 8, 16, True),
        (64, 1, 1, True),
        (0, 0, 65, True),
        (8, 8, 64, True),
        (8, 8, 65, False),
        (16, 1, 17, False),
    ],
)
def test_serves_few_queries(heads_q: int, heads_kv: int, rows: int, served: bool) -> None:
    problem = Problem("bf16", 1, heads_q, heads_kv, rows, 4096, 128, 128)
    assert (FAMILY.domain.refusal(problem, H200) is None) == served


def test_every_head_dim_has_a_default_everywhere() -> None:
    for arch in ("sm_80", "sm_86", "sm_90a", "sm_120a"):
        limits = cuda_limits(arch, 100)
        for head_dim in range(8, 1025, 8):
            for heads, rows in ((8, 1), (64, 1), (128, 4)):
                mask = MASKS[head_dim // 8 % len(MASKS)]
                problem = Problem("f16", 1, heads, 8, rows, 4096, head_dim, head_dim, mask)
                default = FAMILY.default_variant(problem, limits)
                assert default is not None
                assert default.refusal(problem, limits) is None, (arch, default.slug)


@pytest.mark.parametrize(
    ("heads", "rows", "head_dim", "text"),
    [
        (32, 1, 128, "m16n128-k4-c1-s2"),
        (8, 1, 512, "m16n64-k2-c4-s1"),
        (64, 4, 256, "m32n32-k2-c4-s2"),
    ],
)
def test_default_is_what_was_fastest_on_an_h200(
    heads: int, rows: int, head_dim: int, text: str
) -> None:
    problem = Problem("bf16", 1, heads, 8, rows, 8192, head_dim, head_dim)
    default = FAMILY.default_variant(problem, H200)
    assert default is not None
    assert default.slug == f"mma.decode-d{head_dim}-{text}-bf16-none"


def test_never_answers_unmeasured() -> None:
    problem = Problem("bf16", 1, 8, 8, 1, 8192, 128, 128)
    assert not FAMILY.unmeasured(problem, H200)
