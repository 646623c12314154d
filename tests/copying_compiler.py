"""A C++ compiler that knows a few variants by heart, for tests that count compilations."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class CopyingCompiler:
    """A command for `CXX` that copies a library that was built before.

    Attributes:
        command: what CXX is to name.
        calls: a file to which every compilation appends the name of its source.
    """

    def __init__(self, folder: Path, libraries: Iterable[Path], first: str = "") -> None:
        """`first` is shell text that every compilation runs before it copies."""
        folder.mkdir(parents=True, exist_ok=True)
        self.command = folder / "copy-g++"
        self.calls = folder / "calls"
        copies = "\n".join(
            f'grep -qF \'"{library.stem.rpartition("-")[0]}"\' "$source" '
            f"&& exec cp '{library}' \"$out\""
            for library in libraries
        )
        self.command.write_text(
            "#!/bin/sh\n"
            "if [ \"$1\" = --version ]; then echo 'g++ (Copy) 13.2.0'; exit; fi\n"
            "while [ $# -gt 0 ]; do\n"
            '  case "$1" in -o) out=$2; shift;; *.cpp) source=$1;; esac\n'
            "  shift\n"
            "done\n"
            f"echo \"$source\" >>'{self.calls}'\n"
            f"{first}\n{copies}\n"
            "echo 'fatal error: nothing to copy' >&2\n"
            "exit 1\n"
        )
        self.command.chmod(0o755)

    @property
    def runs(self) -> int:
        """How often a variant was compiled so far, by any process."""
        try:
            return sum(line != "empty.cpp" for line in self.calls.read_text().split())
        except FileNotFoundError:
            return 0
