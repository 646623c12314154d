"""Compiles what ships with the package, and puts the sources and the database's files into wheels.

Compiled are the torch operator (csrc/runtime, on libtorch's stable ABI: one binary for many torch
versions, no CUDA) and the default variants of the CPU families. All else about the package is in
pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from autofa import compiler, settings  # noqa: E402
from autofa.compiler.execute import find_ninja  # noqa: E402
from autofa.device import named_limits  # noqa: E402
from autofa.errors import AutofaError  # noqa: E402
from autofa.kernels import REGISTRY  # noqa: E402
from autofa.kernels.catalog import head_dims_of  # noqa: E402
from autofa.kernels.family import Variant  # noqa: E402
from autofa.problem import Problem  # noqa: E402

OLDEST_TORCH = (2, 11)
TORCH_TARGET_VERSION = f"0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"
CPU_TARGETS = ("x86-64-v3", "x86-64-v4") if platform.machine() in ("x86_64", "AMD64") else ()
# Lengths between which no declaration's default changes unnoticed.
LENGTHS = (1, 16, 128, 512, 2048, 8192)


def torch_folder() -> Path:
    """Where torch's headers and libraries are. torch itself is not imported."""
    spec = importlib.util.find_spec("torch")
    oldest = ".".join(map(str, OLDEST_TORCH))
    if spec is None or spec.origin is None:
        raise SystemExit(
            "autofa: torch is not importable in this build environment. Its headers are needed, of "
            f"any version from {oldest} on. Install torch and setuptools first, then autofa with "
            "`pip install --no-build-isolation`."
        )
    version = metadata.version("torch")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST_TORCH:
        raise SystemExit(f"autofa: got torch {version}; needed: {oldest} or newer.")
    return Path(spec.origin).parent


def compile_runtime(output: Path) -> None:
    """The torch operator. Only libtorch's C shim is linked; `-z defs` keeps it so."""
    torch = torch_folder()
    toolchain = compiler.find("cpu", settings.load())
    command = [
        *toolchain.command,
        *("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
        f"-I{ROOT / 'csrc'}",
        f"-I{ROOT / 'csrc' / 'include'}",
        *("-isystem", str(torch / "include")),
        *map(str, sorted((ROOT / "csrc" / "runtime").glob("*.cpp"))),
        *("-o", str(output), f"-L{torch / 'lib'}", "-Wl,--as-needed", "-Wl,-z,defs"),
        *("-ltorch_cpu", "-ldl"),
    ]
    print("compiling csrc/runtime", flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{done.stderr}\nautofa: csrc/runtime did not compile with {toolchain}.")


def baseline() -> list[tuple[Variant, str]]:
    """The default variants of every CPU family, for each x86-64 level with and without AMX."""
    found: dict[tuple[Variant, str], None] = {}
    plain = [named_limits(target) for target in CPU_TARGETS]
    for limits in (*plain, *(replace(p, features=frozenset({"amx_bf16"})) for p in plain)):
        for family in (f for f in REGISTRY.families if f.domain.device == "cpu"):
            for dtype in family.domain.dtypes:
                for mask in family.domain.masks:
                    for dim in head_dims_of(family):
                        for n in LENGTHS:
                            problem = Problem(dtype, 1, 1, 1, n, n, dim, dim, mask, "cpu")
                            variant = family.default_variant(problem, limits)
                            if variant is not None:
                                found[variant, variant.target(limits)] = None
    return list(found)


def compile_variants(folder: Path, scratch: Path) -> None:
    """The prebuilt variants, under the names that the cache gives them."""
    requests = baseline()
    here = settings.load()
    own = settings.Settings(
        cache_dir=scratch.resolve(),
        max_jobs=here.max_jobs,
        cxx=here.cxx,
        search_path=here.search_path,
    )
    print(f"compiling {len(requests)} CPU variants", flush=True)
    builds = compiler.build(requests, own, jobs=jobs_of(own))
    wanted = set()
    for build in builds:
        if build.library is None:
            raise SystemExit(f"autofa: {build.variant.slug} for {build.target}: {build.message}")
        for built in (build.library, build.library.with_suffix(".json")):
            place = folder / build.target / built.name
            place.parent.mkdir(parents=True, exist_ok=True)
            wanted.add(place)
            if not place.exists() or not place.samefile(built):
                shutil.copyfile(built, place)
    for stale in set(folder.glob("*/*.*")) - wanted:
        stale.unlink()  # of sources that are no more


def jobs_of(own: settings.Settings) -> int:
    """One at a time where there is no ninja: a dependency, so it may be installed only later."""
    try:
        find_ninja(own)
    except AutofaError:
        return 1
    return compiler.default_jobs(own, "cpu")


class BuildNative(build_ext):
    """Compiles into `autofa/_native`: of the checkout if editable, else of the wheel."""

    def run(self) -> None:
        folder = self.folder()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            compile_runtime(folder / "autofa_runtime.so")
            compile_variants(folder / "variants", Path(self.build_temp) / "cache")
        except AutofaError as error:
            raise SystemExit(f"autofa: {error}") from None

    def folder(self) -> Path:
        return (ROOT if self.inplace else Path(self.build_lib)) / "autofa" / "_native"

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self.folder().rglob("*.*")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildPy(build_py):
    """Adds csrc/ and db/ to wheels, where a checkout has them beside the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("csrc", "db"):
                place = Path(self.build_lib) / "autofa" / "_resources" / name
                shutil.rmtree(place, ignore_errors=True)
                ignored = shutil.ignore_patterns("__pycache__", "*.so")
                shutil.copytree(ROOT / name, place, ignore=ignored)


class BuildWheel(bdist_wheel):
    """Tagged for the platform only: nothing in it depends on the Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=NativeDistribution,
    cmdclass={"build_ext": BuildNative, "build_py": BuildPy, "bdist_wheel": BuildWheel},
)
