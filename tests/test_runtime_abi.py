"""The ctypes mirrors have the layout that the C headers have, and their numbers are the same."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
from runtime_variants import compiler, require_runtime

from autofa.problem import DTYPES, MASKS
from autofa.resources import csrc_dir
from autofa.runtime import abi, extension

RECORDS = {
    "autofa_params": abi.Params,
    "autofa_metadata": abi.Metadata,
    "autofa_key": abi.LaunchKey,
    "autofa_executor": abi.Executor,
}


@pytest.fixture(scope="module")
def from_c(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Sizes, offsets and enumerators as a C++ compiler sees them."""
    folder: Path = tmp_path_factory.mktemp("abi")
    names = []
    for record, mirror in RECORDS.items():
        names.append((record, f"sizeof({record})"))
        for field, *_ in mirror._fields_:
            names.append((f"{record}.{field}", f"offsetof({record}, {field})"))
    for name in ("F32", "F16", "BF16", "CAUSAL_NONE", "CAUSAL_UPPER_LEFT", "CAUSAL_LOWER_RIGHT"):
        names.append((name, f"AUTOFA_{name}"))
    for name in ("MASK_NONE", "MASK_BOOL", "MASK_ADDITIVE", "ABI_VERSION", "REFUSED", "NO_MEMORY"):
        names.append((name, f"AUTOFA_{name}"))
    lines = "".join(f'  printf("{name} %lld\\n", (long long)({value}));\n' for name, value in names)
    source = folder / "layout.cpp"
    source.write_text(
        '#include <cstddef>\n#include <cstdio>\n#include "runtime/api.h"\n'
        f"int main() {{\n{lines}}}\n"
    )
    program = folder / "layout"
    root = csrc_dir()
    subprocess.run(
        [compiler(), f"-I{root}", f"-I{root / 'include'}", str(source), "-o", str(program)],
        check=True,
    )
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in map(str.split, printed.splitlines())}


@pytest.mark.parametrize("record", RECORDS)
def test_layout(record: str, from_c: dict[str, int]) -> None:
    mirror = RECORDS[record]
    assert ctypes.sizeof(mirror) == from_c[record]
    for field, *_ in mirror._fields_:
        assert getattr(mirror, field).offset == from_c[f"{record}.{field}"], field


def test_numbers(from_c: dict[str, int]) -> None:
    assert [from_c[name.upper()] for name in DTYPES] == [abi.DTYPE_CODES[n] for n in DTYPES]
    assert [from_c[f"MASK_{n.upper()}"] for n in abi.MASK_CODES] == [*abi.MASK_CODES.values()]
    corners = ("NONE", "UPPER_LEFT", "LOWER_RIGHT")
    assert [from_c[f"CAUSAL_{n}"] for n in corners] == [*abi.CAUSAL_CODES.values()]
    assert from_c["ABI_VERSION"] == abi.ABI_VERSION
    assert (from_c["REFUSED"], from_c["NO_MEMORY"]) == (abi.REFUSED, abi.NO_MEMORY)
    # The key's mask is an index into this.
    assert MASKS == ("none", "causal", "causal_lower_right", "bool", "additive")


def test_the_loaded_library_agrees() -> None:
    require_runtime()
    sizes = [extension._get().autofa_sizeof(i) for i in range(len(abi.MIRRORS) + 1)]
    assert sizes == [*map(ctypes.sizeof, abi.MIRRORS), -1]
