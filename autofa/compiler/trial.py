"""Whether a compiler that tells its version can compile at all: it is given an empty file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from autofa.compiler import execute
from autofa.compiler.diagnostics import headline
from autofa.compiler.targets import source_suffix
from autofa.compiler.toolchain import Toolchain, compile_command
from autofa.settings import Settings

DO = "mend this compiler, or name another by CXX or CUDA_HOME"


def failure(
    toolchain: Toolchain, target: str, folder: Path, settings: Settings, timeout: float
) -> str | None:
    """The compiler's output for an empty file, if it fails; None if it makes a library of it."""
    source = folder / f"empty{source_suffix(target)}"
    source.write_text('extern "C" int autofa_probe() { return 0; }\n')
    job = execute.Job(0, compile_command(toolchain, target, (), source.name, "empty.so"))
    [outcome] = execute.run([job], folder, settings, 1, timeout)
    if outcome.expired:
        return f"no end after {timeout:g} s"
    return execute.log_of(folder, 0) if outcome.code != 0 else None


def sentence(toolchain: Toolchain, target: str, log: str) -> str:
    return f"{toolchain} cannot compile an empty file for {target}: {headline(log)}"


def problem(toolchain: Toolchain, target: str, settings: Settings, timeout: float) -> str | None:
    """Why the compiler cannot serve, in one line; None if it can. Leaves no file.

    Raises:
        OSError: there is no folder for temporary files.
        ToolchainError: the command cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="autofa-") as name:
        log = failure(toolchain, target, Path(name), settings, timeout)
    return None if log is None else sentence(toolchain, target, log)
