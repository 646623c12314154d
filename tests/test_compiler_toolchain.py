"""Which compiler is found, and what is said when none fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autofa.compiler import archs, cuda_archs, execute, find, toolchain
from autofa.compiler.execute import find_ninja
from autofa.compiler.toolchain import unsupported
from autofa.device import cuda_limits
from autofa.errors import ToolchainError, UsageError
from autofa.settings import Settings

ARCHS = "compute_75\ncompute_80\ncompute_90\ncompute_120\n"


def fake(path: Path, says: str, rest: str = "exit 1") -> Path:
    """A compiler that answers `--version` with `says`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"#!/bin/sh\ncase $* in *--version) cat <<'X'\n{says}\nX\n;;\n*) {rest};; esac\n"
    )
    path.chmod(0o755)
    return path


def fake_nvcc(folder: Path, release: str) -> Path:
    says = f"nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {release}"
    return fake(folder / "nvcc", says, f"printf '{ARCHS}'")


def path_of(*folders: Path) -> str:
    return ":".join([*map(str, folders), "/usr/bin", "/bin"])


@pytest.fixture
def no_pip_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_pip_nvcc", lambda: None)


def test_the_cpp_compiler_of_path(tmp_path: Path) -> None:
    fake(tmp_path / "g++", "g++ (Some Linux) 15.0.1 20250101")
    found = find("cpu", Settings(search_path=path_of(tmp_path)))
    assert found.release == (15, 0)
    assert found.version == "g++ (Some Linux) 15.0.1 20250101"
    assert found.origin == "PATH"


def test_cxx_comes_first_and_may_be_clang(tmp_path: Path) -> None:
    clang = fake(tmp_path / "clang++", "Debian clang version 14.0.6\nTarget: x86_64")
    found = find("cpu", Settings(cxx=(str(clang), "-stdlib=libc++"), search_path=path_of()))
    assert found.command == (str(clang), "-stdlib=libc++")
    assert (found.release, found.origin) == ((14, 0), "CXX")


@pytest.mark.parametrize(
    ("says", "release"),
    [
        ("g++ (crosstool-NG 1.25.0) 12.1.0", (12, 1)),
        ("g++ (GCC) 11.5.0 20240719 (Red Hat 11.5.0-2)", (11, 5)),
        ("x86_64-conda-linux-gnu-c++ (conda-forge gcc 13.3.0-1) 13.3.0", (13, 3)),
        ("g++ 12.2.0", (12, 2)),
    ],
)
def test_releases_are_read(tmp_path: Path, says: str, release: tuple[int, int]) -> None:
    cxx = fake(tmp_path / "g++", says)
    assert find("cpu", Settings(cxx=(str(cxx),), search_path=path_of())).release == release


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("g++ (Old Linux) 9.4.0", "got release 9.4, needed 11.0 or newer"),
        ("clang version 10.0.1", "got release 10.0, needed 12.0 or newer"),
        ("hello", "got 'hello', no release number"),
        ("", "got '', no release number"),
    ],
)
def test_unusable_cpp_compilers(tmp_path: Path, says: str, expected: str) -> None:
    cxx = fake(tmp_path / "g++", says)
    with pytest.raises(ToolchainError, match=expected) as caught:
        find("cpu", Settings(cxx=(str(cxx),), search_path=path_of()))
    assert str(cxx) in str(caught.value)
    assert "apt-get install g++" in str(caught.value)


def test_no_cpp_compiler(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"no g\+\+ or c\+\+ in PATH"):
        find("cpu", Settings(search_path=str(tmp_path)))
    with pytest.raises(ToolchainError, match="CXX=no-such-compiler: no such command"):
        find("cpu", Settings(cxx=("no-such-compiler",), search_path=path_of()))
    with pytest.raises(ToolchainError, match="`/bin/false --version` failed with exit code 1"):
        find("cpu", Settings(cxx=("/bin/false",), search_path=path_of()))


def test_a_compiler_that_hangs(tmp_path: Path) -> None:
    hung = tmp_path / "g++"
    hung.write_text("#!/bin/sh\nsleep 3600\n")
    hung.chmod(0o755)
    with pytest.raises(ToolchainError, match=r"gave no answer in 0.3 s"):
        find("cpu", Settings(cxx=(str(hung),), search_path=path_of()), 0.3)


def test_cuda_home_comes_before_path(tmp_path: Path) -> None:
    fake_nvcc(tmp_path / "home" / "bin", "12.9, V12.9.86")
    fake_nvcc(tmp_path / "path", "13.0, V13.0.88")
    path = path_of(tmp_path / "path")
    first = find("cuda", Settings(cuda_home=tmp_path / "home", search_path=path))
    assert (first.release, first.origin) == ((12, 9), "CUDA_HOME")
    second = find("cuda", Settings(cuda_home=tmp_path / "nothing", search_path=path))
    assert (second.release, second.origin) == ((13, 0), "PATH")
    assert second.link == ("-cudart", "shared")


@pytest.mark.usefixtures("no_pip_nvcc")
def test_no_nvcc_names_all_places(tmp_path: Path) -> None:
    settings = Settings(cuda_home=tmp_path / "nothing", search_path=str(tmp_path))
    with pytest.raises(ToolchainError, match=r"not in CUDA_HOME=.*, PATH or the pip packages"):
        find("cuda", settings)
    with pytest.raises(ToolchainError, match=r"CUDA_HOME \(not set\)"):
        find("cuda", Settings(search_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("11.8, V11.8.89", "got release 11.8, needed 12.8 or newer"),
        ("garbage", "no release number"),
    ],
)
def test_unusable_nvcc(tmp_path: Path, release: str, expected: str) -> None:
    nvcc = fake_nvcc(tmp_path, release)
    with pytest.raises(ToolchainError, match=expected) as caught:
        find("cuda", Settings(search_path=path_of(tmp_path)))
    assert str(nvcc) in str(caught.value)


def test_nvcc_of_the_pip_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "site" / "nvidia" / "cu13"
    fake_nvcc(home / "bin", "13.0, V13.0.88")
    monkeypatch.syspath_prepend(tmp_path / "site")
    settings = Settings(search_path=path_of(tmp_path))
    with pytest.raises(ToolchainError, match="nvidia-cuda-runtime"):
        find("cuda", settings)
    (home / "lib").mkdir()
    (home / "lib" / "libcudart.so.13").touch()
    found = find("cuda", settings)
    assert found.origin == "pip"
    assert found.link == ("-cudart", "none", f"-L{home / 'lib'}", "-l:libcudart.so.13")


def test_nvcc_says_which_architectures_it_knows(tmp_path: Path) -> None:
    fake_nvcc(tmp_path, "13.0, V13.0.88")
    settings = Settings(search_path=path_of(tmp_path))
    nvcc = find("cuda", settings)
    assert cuda_archs(nvcc, settings) == ("sm_75", "sm_80", "sm_90", "sm_120")
    assert unsupported(nvcc, "sm_90a", settings) is None
    assert "12.9 is the last" in (unsupported(nvcc, "sm_70", settings) or "")
    assert "a newer CUDA" in (unsupported(nvcc, "sm_130", settings) or "")
    assert unsupported(nvcc, "compute_120", settings) is None
    assert "no CUDA from 12.8 on" in (unsupported(nvcc, "sm_37", settings) or "")
    assert "another release" in (unsupported(nvcc, "sm_88", settings) or "")


def test_an_architecture_that_nvcc_does_not_know_spoils_nothing(tmp_path: Path) -> None:
    fake_nvcc(tmp_path, "13.0, V13.0.88")
    settings = Settings(search_path=path_of(tmp_path))
    plain = archs.resolve("sm_90a", settings)
    assert (plain.limits, plain.note) == (cuda_limits("sm_90a"), "")
    for name in ("sm_130", "sm_130a", "sm_121"):  # the last one is known here, not to that nvcc
        newer = archs.resolve(name, settings)
        assert newer.limits == replace(cuda_limits("sm_120"), arch="compute_120")
        assert "PTX of compute_120 is built for it" in newer.note
        assert newer.note.startswith(f"{name} is newer than Cuda compilation tools, release 13.0")
    older = archs.resolve("sm_70", settings)
    assert older.limits is None
    assert "12.9 is the last that knows sm_50 to sm_72" in older.note
    assert "compute_" not in (archs.resolve("sm_86", settings).note or "")
    assert archs.resolve("sm_86", settings).limits is None
    assert archs.resolve("H200", settings).limits == cuda_limits("sm_90a")
    with pytest.raises(UsageError, match="limits"):
        archs.resolve("abc", settings)


@pytest.mark.usefixtures("no_pip_nvcc")
def test_architectures_without_an_nvcc(tmp_path: Path) -> None:
    nothing = Settings(search_path=str(tmp_path))
    assert archs.resolve("sm_80", nothing).limits == cuda_limits("sm_80")
    newer = archs.resolve("sm_130", nothing)
    assert newer.limits == replace(cuda_limits("sm_121"), arch="compute_121")
    assert newer.note.startswith("sm_130 is newer than this autofa knows")
    assert "sm_60" in archs.resolve("sm_60", nothing).note


def test_ninja_beside_the_interpreter_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute.sys, "executable", str(tmp_path / "bin" / "python"))
    with pytest.raises(ToolchainError, match="pip install ninja"):
        find_ninja(Settings(search_path=str(tmp_path)))
    on_path = fake(tmp_path / "ninja", "1.12")
    assert find_ninja(Settings(search_path=str(tmp_path))) == str(on_path)
    beside = fake(tmp_path / "bin" / "ninja", "1.12")
    assert find_ninja(Settings(search_path=str(tmp_path))) == str(beside)
