"""Hopper's instructions on the emulator: right where they are used right, and wrong results or an
error for each mistake that the hardware would answer with wrong results or a hang."""

from __future__ import annotations

import ctypes
import math
import subprocess
from pathlib import Path

import cuda_variants
import pytest
import torch

from autofa import compiler, settings
from autofa.resources import csrc_dir
from autofa.runtime import abi

SOURCE = Path(__file__).parent / "hopper_check.cu"
LAUNCH_FAILURE = 719
_SM_90A = ("-gencode=arch=compute_90a,code=sm_90a",)
# In the order of the source's enum: what the emulator says; nothing where the result is wrong, or a
# barrier waits for ever, as the threads happen to run.
MISTAKES = {
    "no wait for the copy": "",
    "no wait for the product": "",
    "no wgmma_fence": "without wgmma_fence",
    "a stage released before the product was waited for": "",
    "a wrong distance of column groups": "",
    "operand registers overwritten": "operand registers",
    "no fence_proxy_async": "without fence_proxy_async",
    "too many bytes expected": "deadlock",
    "no fence of the initialisation": "initialisation without its fence",
    "the wrong parity": "",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("hopper")
    source = folder / "check.cpp"
    source.write_text(
        f'#include "{SOURCE}"\nEMULATE_SHARED_MEMORY(autofa::hopper_check)\n'
        'extern "C" AUTOFA_API const char* failure() { return emulator::failure.c_str(); }\n'
    )
    command = compiler.find("cpu", settings.load()).command
    flags = ("-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
    includes = (f"-I{cuda_variants.EMULATOR}", f"-I{csrc_dir() / 'include'}")
    built = folder / "check.so"
    subprocess.run([*command, *flags, *includes, str(source), "-o", str(built)], check=True)
    loaded = ctypes.CDLL(str(built))
    loaded.failure.restype = ctypes.c_char_p
    return loaded


def multiplied(
    library: ctypes.CDLL,
    columns: int = 96,
    rows: int = 64,
    keys: int = 48,
    mistake: int = 0,
    device: str = "cpu",
) -> tuple[int, float]:
    """What the launch returned, and the largest error; heads and first rows differ by the call."""
    head, first_row = (1, 5) if rows < 64 else (0, 0)
    torch.manual_seed(columns)
    q, k, v = (torch.randn(2, n, columns).bfloat16().to(device) for n in (rows, keys, keys))
    q[..., 96:] = 0  # more is not multiplied
    out = torch.full((64, 96), math.nan, device=device)
    call = library.check_multiply
    call.argtypes = (ctypes.c_void_p,) * 4 + (ctypes.c_int64,) * 3 + (ctypes.c_int32,) * 3
    pointers = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
    code = int(call(*pointers, rows, keys, columns, head, first_row, mistake))
    want = torch.zeros(64, 96)
    scores = (q[head].cpu().float() @ k[head].cpu().float().T).bfloat16().float()
    product = scores @ v[head].cpu().float()
    want[: rows - first_row, :columns] = product[first_row:, :96]
    return code, (out.cpu() - want).abs().max().item() if code == abi.OK else math.nan


def swapped(library: ctypes.CDLL, mistake: int = 0, device: str = "cpu") -> tuple[int, bool]:
    """What the launch returned, and whether each block got its peer's numbers."""
    out = torch.zeros(4, 2, 32, device=device)
    call = library.check_swap
    call.argtypes = (ctypes.c_void_p, ctypes.c_int32)
    code = int(call(out.data_ptr(), mistake))
    peer = torch.tensor([1, 0, 3, 2])[:, None, None] * 1000.0
    number = peer + torch.arange(2)[:, None] * 100 + torch.arange(32)
    return code, torch.equal(out.cpu(), 5 * number + 6)


SHAPES = [(96, 64, 48), (72, 50, 33), (8, 64, 48), (128, 64, 48), (64, 50, 33)]


@pytest.mark.parametrize(("columns", "rows", "keys"), SHAPES)
def test_products_of_tiles(library: ctypes.CDLL, columns: int, rows: int, keys: int) -> None:
    """Whole tiles; and zeros for the columns, rows and keys that a tensor does not have. Multiples
    of 64 columns are copied by five dimensions, two groups at once."""
    code, error = multiplied(library, columns, rows, keys)
    assert code == abi.OK, library.failure()
    # Sums in another order may round a score to the other side, which is 1/256 of it.
    assert error < 0.6


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_mistakes_show(library: ctypes.CDLL, mistake: str) -> None:
    said = MISTAKES[mistake]
    code, error = multiplied(library, mistake=1 + list(MISTAKES).index(mistake))
    if not said:
        assert code == LAUNCH_FAILURE or not error < 5
    else:
        assert code == LAUNCH_FAILURE
        assert said in library.failure().decode()


def test_maps_refuse_what_tma_cannot_read(library: ctypes.CDLL) -> None:
    assert multiplied(library, columns=84)[0] == abi.REFUSED
    assert multiplied(library, keys=0)[0] == abi.REFUSED


def test_clusters_exchange(library: ctypes.CDLL) -> None:
    assert swapped(library) == (abi.OK, True), library.failure()
    early = 1 + list(MISTAKES).index("a stage released before the product was waited for")
    assert swapped(library, early) != (abi.OK, True)


@pytest.mark.gpu
@pytest.mark.nvcc
def test_the_hardware_agrees(tmp_path: Path) -> None:
    """The same kernels, without mistakes, compiled by nvcc."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    built = tmp_path / "check.so"
    command = compiler.find("cuda", settings.load()).command
    flags = ("-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC", *_SM_90A)
    include = f"-I{csrc_dir() / 'include'}"
    subprocess.run([*command, *flags, include, str(SOURCE), "-o", str(built)], check=True)
    hardware = ctypes.CDLL(str(built))
    for shape in SHAPES:
        code, error = multiplied(hardware, *shape, device="cuda")
        assert code == abi.OK
        assert error < 0.6
    assert swapped(hardware, device="cuda") == (abi.OK, True)
