"""Every test has its own database and never sees the user's; markers skip what is not here."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import postgres_server
import pytest

from autofa import compiler, resources, settings
from autofa.errors import ToolchainError
from autofa.kernels.family import Domain, KernelFamily, Param
from autofa.settings import Settings

# Background jobs of a shell without job control start with SIGINT ignored; tests that interrupt,
# and the processes they start, need the usual answer to it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of libraries for all tests and all processes of pytest-xdist, so that each is
    compiled once; AUTOFA_TEST_CACHE names one that is there already, for machines without a
    compiler."""
    given = os.environ.get("AUTOFA_TEST_CACHE")
    if given:
        return Path(given)
    root = tmp_path_factory.getbasetemp()
    cache = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "cache"
    cache.mkdir(exist_ok=True)
    return cache


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, session_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AUTOFA_")]:
        if not name.startswith("AUTOFA_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AUTOFA_DB", str(tmp_path / "autofa.db"))
    monkeypatch.setenv("AUTOFA_CACHE_DIR", str(session_cache))


@pytest.fixture(scope="session")
def postgres() -> Iterator[postgres_server.Server]:
    """The tests' own PostgreSQL server, for tests marked `postgres`."""
    with postgres_server.Server.running() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: postgres_server.Server) -> Iterator[str]:
    """An empty database of that server."""
    with postgres.database() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def databases(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Makes empty databases: what is said of the store holds on a file and on a server alike."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            numbers = itertools.count()
            yield lambda: str(tmp_path / f"folder %41?# {next(numbers)}" / "autofa.db")
        else:
            server = request.getfixturevalue("postgres")
            yield lambda: stack.enter_context(server.database())


@pytest.fixture
def location(databases: Callable[[], str]) -> str:
    """An empty database of each kind."""
    return databases()


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """A CPU's rows are keyed by torch's threads: a change would change all tests after it."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    yield
    if torch is not None and torch.get_num_threads() != before:
        torch.set_num_threads(before)


def _no_nvcc() -> str | None:
    try:
        compiler.find("cuda", settings.load())
    except ToolchainError as error:
        return str(error)
    return None


def _fewer_gpus_than(wanted: int) -> str | None:
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return None if found >= wanted else f"needs {wanted} CUDA GPU(s), found {found}"


_MISSING: dict[str, Callable[[], str | None]] = {
    "nvcc": _no_nvcc,
    "gpu": lambda: _fewer_gpus_than(1),
    "gpu2": lambda: _fewer_gpus_than(2),
    "postgres": postgres_server.missing,
}


# Files of tests that measure, tune, or bound how long something takes: with others beside them on
# the same cores they fail for no fault of their own.
_ALONE = frozenset(
    f"test_{name}"
    for name in (
        "bench_worker", "cli", "cli_start", "cli_streams", "compiler_processes", "dispatch_faults",
        "dispatch_parallel", "dispatch_process", "dispatch_server", "fanout", "fleet_search",
        "fleet_server", "no_toolkit", "server_commands", "store_files", "store_processes", "sweep",
        "tuning_cpu", "tuning_faults", "tuning_resume", "vendor_libraries",
    )
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons: dict[str, str | None] = {}
    for item in items:
        if item.path.stem in _ALONE:
            item.add_marker(pytest.mark.alone)
        for name, missing in _MISSING.items():
            if item.get_closest_marker(name) is not None:
                if name not in reasons:
                    reasons[name] = missing()
                if reasons[name] is not None:
                    item.add_marker(pytest.mark.skip(reason=reasons[name]))


_TINY_CPU = """#pragma once
#include "autofa/abi.h"
#include "kernels/tiny/answer.h"
namespace autofa::tiny {
template <class Params>
struct Kernel {
  static constexpr int threads = 0, smem_bytes = 0;
  static int32_t launch(const autofa_params&, const autofa_executor&, void*) {
    return kAnswer * Params::factor;
  }
  static int64_t workspace_bytes(const autofa_params&) { return 0; }
};
}  // namespace autofa::tiny
"""
_TINY_CUDA = """#pragma once
#include <cuda_runtime.h>
#include "autofa/abi.h"
#include "kernels/tiny/answer.h"
namespace autofa::tiny {
template <class Params>
__global__ void fill(float* out, int n) {
  __shared__ float part[256];
  part[threadIdx.x] = kAnswer * Params::factor;
  __syncthreads();
  if (threadIdx.x < n) out[threadIdx.x] = part[255 - threadIdx.x];
}
template <class Params>
struct Kernel {
  static constexpr int threads = 256, smem_bytes = 1024 * Params::factor;
  static int32_t launch(const autofa_params& p, const autofa_executor&, void* stream) {
    fill<Params><<<1, threads, smem_bytes, static_cast<cudaStream_t>(stream)>>>(p.lse, 1);
    return cudaGetLastError();
  }
  static int64_t workspace_bytes(const autofa_params&) { return 0; }
};
}  // namespace autofa::tiny
"""


@pytest.fixture
def tiny_family(tmp_path: Path) -> Callable[..., KernelFamily]:
    """Makes a family whose kernel returns 7 times its parameter: `tiny_family("cpu" or "cuda")`.

    Its sources lie in `tmp_path / "csrc"` and may be edited; keyword arguments replace fields of
    the declaration.
    """

    def make(device: str = "cpu", **fields: object) -> KernelFamily:
        root = tmp_path / "csrc"
        folder = root / "kernels" / "tiny"
        if not root.exists():
            shutil.copytree(resources.csrc_dir() / "include", root / "include")
            folder.mkdir(parents=True)
            (folder / "answer.h").write_text("#pragma once\nconstexpr int kAnswer = 7;\n")
            (folder / "kernel.h").write_text(_TINY_CPU if device == "cpu" else _TINY_CUDA)
        declared: dict[str, object] = {
            "name": "test.tiny",
            "title": "tiny",
            "version": 1,
            "folder": "tiny",
            "entry": "kernel.h",
            "domain": Domain(device, ("f32",), masks=("none", "causal")),
            "params": (Param("factor", tuple(range(1, 13)), "x{}"),),
            "target": lambda p, limits: limits.arch,
            "default": lambda problem, limits: {"factor": 1},
            "specialised": ("dtype",),
            "root": root,
        }
        if device == "cuda":
            declared["threads"] = lambda p, problem: 256
            declared["smem_bytes"] = lambda p, problem: 1024 * p.factor
        return KernelFamily(**{**declared, **fields})  # type: ignore[arg-type]

    return make


@pytest.fixture
def here(tmp_path: Path) -> Settings:
    """The environment's compilers, a cache of this test's own."""
    return replace(settings.load(), cache_dir=tmp_path / "cache", max_jobs=2)


@pytest.fixture
def fake_cxx(tmp_path: Path, here: Settings) -> Callable[[str], Settings]:
    """Settings with a C++ compiler that runs a shell text first. `$real` is the real command;
    every compilation appends a line to `calls`."""

    def make(text: str, version: str = "g++ (Fake) 13.2.0") -> Settings:
        real = shlex.join(compiler.find("cpu", here).command)
        script = tmp_path / "fake-g++"
        script.write_text(
            f"#!/bin/sh\nif [ \"$1\" = --version ]; then echo '{version}'; exit; fi\n"
            f'real="{real}"\necho "$*" >>{tmp_path / "calls"}\n{text}\n'
        )
        script.chmod(0o755)
        return replace(here, cxx=(str(script),))

    return make
