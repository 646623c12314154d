"""Finds the compilers, and writes their command lines. The only file that knows their names."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from autofa.compiler import execute
from autofa.compiler.targets import flags_of, kind_of
from autofa.errors import ToolchainError
from autofa.settings import Settings

# sm_120 is known from CUDA 12.8 on; the levels x86-64-v3 and v4 from g++ 11 and clang 12 on.
OLDEST_NVCC = (12, 8)
_OLDEST_ARCH = 50  # of OLDEST_NVCC
OLDEST_GCC = (11, 0)
OLDEST_CLANG = (12, 0)

# A compiler that takes longer to tell its version hangs.
VERSION_SECONDS = 20.0

_GET_NVCC = (
    "install CUDA 12.8 or newer and set CUDA_HOME or PATH, or `pip install autofa[cuda]`; "
    "without a compiler attention() answers with what is already built, or with SDPA"
)
_GET_CXX = (
    "install g++ 11 or newer (Debian, Ubuntu: `apt-get install g++`), or set CXX; "
    "without a compiler attention() answers with what is already built, or with SDPA"
)


@dataclass(frozen=True)
class Toolchain:
    """A compiler that answered.

    Attributes:
        kind: `cuda` or `cpu`.
        command: how it is started.
        version: the line of `--version` that names its release; what records call "the compiler".
        release: major and minor number.
        origin: where it was found: `CXX`, `CUDA_HOME`, `PATH` or `pip`.
        link: flags that this installation needs for linking.
    """

    kind: str
    command: tuple[str, ...]
    version: str
    release: tuple[int, int]
    origin: str
    link: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.version} ({' '.join(self.command)}, from {self.origin})"


def ask(
    command: tuple[str, ...], settings: Settings, do: str, patience: float = VERSION_SECONDS
) -> str:
    """What a compiler prints. It is run as compilations are, so that it ends with this process.

    Raises:
        ToolchainError: it cannot be started, fails, or hangs.
    """
    shown = " ".join(command)
    try:
        with tempfile.TemporaryDirectory(prefix="autofa-") as name:
            folder = Path(name)
            job = execute.Job(0, command)
            [outcome] = execute.run([job], folder, settings, 1, patience)
            said = execute.log_of(folder, 0)
    except OSError as error:
        raise ToolchainError(f"`{shown}`: {error}; {do}") from None
    if outcome.expired:
        raise ToolchainError(f"`{shown}` gave no answer in {patience:g} s; {do}")
    if outcome.code != 0:
        first = said.strip().splitlines()[:1]
        why = f": {first[0]}" if first else ""
        raise ToolchainError(f"`{shown}` failed with exit code {outcome.code}{why}; {do}")
    return said


def _release(command: tuple[str, ...], text: str, pattern: str, do: str) -> tuple[str, int, int]:
    for line in text.splitlines():
        match = re.search(pattern, line)
        if match is not None:
            return line.strip(), int(match.group(1)), int(match.group(2))
    shown = text.strip().splitlines()[0][:80] if text.strip() else ""
    raise ToolchainError(f"`{' '.join(command)} --version`: got {shown!r}, no release number; {do}")


def _refuse_older(name: str, found: tuple[int, int], oldest: tuple[int, int], do: str) -> None:
    if found < oldest:
        got, needed = (".".join(map(str, release)) for release in (found, oldest))
        raise ToolchainError(f"{name}: got release {got}, needed {needed} or newer; {do}")


def _pip_nvcc() -> Path | None:
    """nvcc of the pip packages, which unite under `nvidia/cu13` (and later `cuNN`)."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for nvcc in sorted(Path(place).glob("cu*/bin/nvcc"), reverse=True):
            return nvcc
    return None


def _cudart(root: Path, origin: str) -> tuple[str, ...]:
    """How to link the CUDA runtime of the installation at `root` as a shared library."""
    folder = root / "lib"
    versioned = sorted(folder.glob("libcudart.so.*"), key=lambda path: len(path.name))
    if versioned and not (folder / "libcudart.so").exists():
        # The wheels lack the unversioned name that `-cudart shared` looks for.
        return ("-cudart", "none", f"-L{folder}", f"-l:{versioned[0].name}")
    if origin == "pip":
        raise ToolchainError(
            f"nvcc of the pip packages: found {root}, but no lib/libcudart.so.* in it; "
            "`pip install autofa[cuda]` brings nvidia-cuda-runtime"
        )
    return ("-cudart", "shared")


def _find_cuda(settings: Settings, patience: float) -> Toolchain:
    places: list[tuple[Path | None, str]] = []
    if settings.cuda_home is not None:
        nvcc = settings.cuda_home / "bin" / "nvcc"
        places.append((nvcc if nvcc.is_file() else None, "CUDA_HOME"))
    on_path = shutil.which("nvcc", path=settings.search_path)
    places.append((Path(on_path) if on_path else None, "PATH"))
    places.append((_pip_nvcc(), "pip"))
    there = [(path, origin) for path, origin in places if path is not None]
    if not there:
        looked = f"CUDA_HOME={settings.cuda_home}" if settings.cuda_home else "CUDA_HOME (not set)"
        raise ToolchainError(f"nvcc: not in {looked}, PATH or the pip packages; {_GET_NVCC}")
    nvcc_path, origin = there[0][0].absolute(), there[0][1]
    command = (str(nvcc_path),)
    said = ask((*command, "--version"), settings, _GET_NVCC, patience)
    version, major, minor = _release(command, said, r"release (\d+)\.(\d+)", _GET_NVCC)
    _refuse_older(str(nvcc_path), (major, minor), OLDEST_NVCC, _GET_NVCC)
    link = _cudart(nvcc_path.parents[1], origin)
    return Toolchain("cuda", command, version, (major, minor), origin, link)


def _find_cpu(settings: Settings, patience: float) -> Toolchain:
    if settings.cxx is not None:
        where = shutil.which(settings.cxx[0], path=settings.search_path)
        if where is None:
            raise ToolchainError(f"CXX={' '.join(settings.cxx)}: no such command; {_GET_CXX}")
        command, origin = (str(Path(where).absolute()), *settings.cxx[1:]), "CXX"
    else:
        names = ("g++", "c++")
        found = next((n for n in names if shutil.which(n, path=settings.search_path)), None)
        if found is None:
            raise ToolchainError(f"C++ compiler: CXX is not set, no g++ or c++ in PATH; {_GET_CXX}")
        command, origin = (found,), "PATH"
    said = ask((*command, "--version"), settings, _GET_CXX, patience)
    version, major, minor = _release(command, said, r"(?:\)|version|\+\+) (\d+)\.(\d+)", _GET_CXX)
    oldest = OLDEST_CLANG if "clang" in said else OLDEST_GCC
    _refuse_older(" ".join(command), (major, minor), oldest, _GET_CXX)
    return Toolchain("cpu", command, version, (major, minor), origin)


# What was found, by all that decides it. A race between threads costs a second question.
_found: dict[tuple[object, ...], Toolchain] = {}


def find(kind: str, settings: Settings, patience: float = VERSION_SECONDS) -> Toolchain:
    """The compiler for `kind` (`cuda` or `cpu`). What was found is remembered in this process.

    nvcc is looked for in CUDA_HOME, then PATH, then the pip packages; the C++ compiler is CXX, else
    g++, else c++. The first one there is taken: if it does not answer properly, that is an error.

    Args:
        patience: seconds that it may take to tell its version.

    Raises:
        ToolchainError: none is there, it is too old, or it gives no proper answer.
    """
    key = (kind, settings.cxx, settings.cuda_home, settings.search_path)
    if key not in _found:
        _found[key] = (_find_cuda if kind == "cuda" else _find_cpu)(settings, patience)
    return _found[key]


@lru_cache(maxsize=16)
def _known_archs(command: tuple[str, ...], search_path: str) -> tuple[str, ...]:
    settings = Settings(search_path=search_path)
    said = ask((*command, "--list-gpu-arch"), settings, "check this installation of CUDA")
    numbers = sorted({int(n) for n in re.findall(r"compute_(\d+)", said)})
    return tuple(f"sm_{n}" for n in numbers)


def cuda_archs(toolchain: Toolchain, settings: Settings) -> tuple[str, ...]:
    """The architectures that this nvcc compiles for, oldest first, without `a` or `f` suffixes.

    Raises:
        ToolchainError: it does not answer `--list-gpu-arch`.
    """
    return _known_archs(toolchain.command, settings.search_path)


def unsupported(toolchain: Toolchain, target: str, settings: Settings) -> str | None:
    """Why `toolchain` cannot compile for `target`; None if it can."""
    if toolchain.kind == "cpu":
        return None  # OLDEST_GCC and OLDEST_CLANG know every level
    known = cuda_archs(toolchain, settings)
    if target.replace("compute_", "sm_").rstrip("af") in known:
        return None
    number, *numbers = (int(re.sub(r"[^0-9]", "", arch)) for arch in (target, *known))
    if number < _OLDEST_ARCH:
        do = f"no CUDA from {'.'.join(map(str, OLDEST_NVCC))} on knows it"
    elif number < min(numbers, default=0):
        do = "use an older CUDA: 12.9 is the last that knows sm_50 to sm_72"
    elif number > max(numbers, default=0):
        do = "a newer CUDA is needed for this architecture"
    else:
        do = "another release of CUDA is needed for this architecture"
    supported = ", ".join(known)
    return f"{target}: not known to {toolchain.version}; supported: {supported}; {do}"


def compile_command(
    toolchain: Toolchain, target: str, includes: tuple[str, ...], source: str, output: str
) -> tuple[str, ...]:
    """The one command that makes a library from a source."""
    paths = tuple(f"-I{path}" for path in includes)
    report = ("-Xptxas=-v",) if kind_of(target) == "cuda" else ()
    return (
        *toolchain.command,
        *flags_of(target),
        *report,
        *paths,
        source,
        "-o",
        output,
        *toolchain.link,
    )
