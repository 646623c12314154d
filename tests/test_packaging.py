"""What is installed: version, metadata, scripts, and wheels that work away from the tree."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import setuptools

from autofa._version import __version__

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("scripts/demo", "scripts/lint", "scripts/test", ".ci/run")


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions of setup.py."""
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    return runpy.run_path(str(ROOT / "setup.py"))


def test_the_version_is_stated_once() -> None:
    import autofa

    assert autofa.__version__ == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    for name in ("pyproject.toml", "setup.py"):
        assert f'"{__version__}"' not in (ROOT / name).read_text()


def test_what_is_installed_meets_the_declared_bounds() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    declared = pyproject.split("\ndependencies = [")[1].split("]")[0]
    bounds = re.findall(r'"([\w-]+)>=([\d.]+)[^;"]*"', declared)
    assert len(bounds) == 10
    for name, bound in bounds:
        found = re.findall(r"\d+", metadata.version(name))
        assert tuple(map(int, found)) >= tuple(map(int, bound.split("."))), name


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_can_be_run(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_without_torch_the_build_says_what_to_do(
    setup_py: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="torch is not importable") as caught:
        setup_py["torch_folder"]()
    assert "--no-build-isolation" in str(caught.value)


def test_a_torch_that_is_too_old_is_named(
    setup_py: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.10.1+cu128")
    with pytest.raises(SystemExit, match=r"got torch 2\.10\.1\+cu128; needed: 2\.11 or newer"):
        setup_py["torch_folder"]()


def test_without_a_compiler_the_build_says_what_to_do(
    setup_py: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    command = setup_py["BuildNative"](setuptools.Distribution())
    command.inplace = False
    command.build_lib = command.build_temp = str(tmp_path)
    with pytest.raises(SystemExit, match="CXX=no-such-compiler: no such command"):
        command.run()


def test_the_prebuilt_variants_serve_every_x86_64_level(setup_py: dict[str, Any]) -> None:
    requests = setup_py["baseline"]()
    if not setup_py["CPU_TARGETS"]:
        pytest.skip("not an x86-64 machine: nothing is prebuilt")
    served = {(target, variant.dtype) for variant, target in requests}
    assert served >= {(f"x86-64-v{n}", dtype) for n in (3, 4) for dtype in ("f32", "bf16")}
    assert len(requests) <= 14, "each costs 1-3 s of every installation, and 100 KB of the wheel"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of this tree, and the wheel made from that sdist."""
    folder = tmp_path_factory.mktemp("packaging")
    ignored = (".git", ".venv", "build", "dist", "*.egg-info", "_native", "_resources", ".*_cache")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*ignored))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist")]
    done = subprocess.run(command, cwd=folder / "tree", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "dist"


@pytest.fixture(scope="module")
def installed(built: Path) -> Iterator[Path]:
    """The Python of a new environment that has the wheel, and sees this one's dependencies."""
    place = built.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = place / "bin" / "python"
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    Path(site, "theirs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    [wheel] = built.glob("*.whl")
    command = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True)
    yield python
    shutil.rmtree(place)


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
def test_one_wheel_for_all_pythons_with_all_it_needs(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    assert re.fullmatch(rf"autofa-{re.escape(__version__)}-py3-none-linux_\w+\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = [p for top in ("csrc", "db") for p in (ROOT / top).rglob("*") if p.is_file()]
    for path in shipped:
        if "__pycache__" not in path.parts:
            assert f"autofa/_resources/{path.relative_to(ROOT)}" in names
    assert "autofa/_native/autofa_runtime.so" in names
    assert "autofa/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "csrc/", "db/"))]
    libraries = [name for name in names if name.startswith("autofa/_native/variants/")]
    assert len(libraries) % 2 == 0
    assert all(name.removesuffix(".so") + ".json" in names for name in libraries if ".so" in name)


_LOOK = """
import autofa, torch
from autofa import compiler, resources, settings
from autofa.device import named_limits
from autofa.kernels import REGISTRY
from autofa.problem import parse_shape
print(autofa.__file__)
print(resources.csrc_dir())
torch.ops.load_library(str(resources.runtime_library()))
family = REGISTRY.family("cpu.flash")
for dtype in ("f32", "bf16"):
    problem = parse_shape("1,8,512,64", dtype=dtype, device="cpu")
    for level in ("x86-64-v3", "x86-64-v4"):
        variant = family.default_variant(problem, named_limits(level))
        print(compiler.library_of(variant, level, settings.load()))
"""


@pytest.mark.slow
def test_the_wheel_works_away_from_the_tree(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("AUTOFA_CACHE_DIR", str(tmp_path / "cache"))
    for place in run([str(installed), "-W", "ignore", "-c", _LOOK], tmp_path).splitlines():
        assert place.startswith(str(installed.parent.parent)), place
    autofa = str(installed.with_name("autofa"))
    assert __version__ in run([autofa, "--version"], tmp_path)
    assert "cpu.flash" in run([autofa, "kernels"], tmp_path)
    tune = ["tune", "--device", "cpu", "--shape", "1,2,128,64", "--dtype", "f32", "--trials", "2"]
    run([autofa, *tune], tmp_path)
    assert "torch.sdpa" in run([autofa, "report"], tmp_path)
