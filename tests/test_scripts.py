"""When the scripts install, and when they find what they need in place."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Stands for the environment's Python: notes installations, and "compiles" as one does.
PYTHON = """#!/bin/sh
case "$*" in
  *--no-build-isolation*)
    echo installed >>log
    mkdir -p autofa/_native && : >autofa/_native/autofa_runtime.so
    ;;
  -c*) echo /somewhere ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for folder in ("scripts", "csrc", "autofa/kernels", "autofa/compiler", ".venv/bin"):
        (root / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "_env", root / "scripts")
    for name in ("pyproject.toml", "setup.py", "csrc/a.h", "autofa/kernels/a.py"):
        (root / name).write_text(name)
    python = root / ".venv" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return root


def test_it_installs_after_a_change_and_where_nothing_is_compiled(checkout: Path) -> None:
    def installs() -> int:
        subprocess.run(["bash", "-ec", 'source scripts/_env; ready ""'], cwd=checkout, check=True)
        return len((checkout / "log").read_text().split())

    assert [installs(), installs()] == [1, 1]
    (checkout / "csrc" / "a.h").write_text("changed")
    assert [installs(), installs()] == [2, 2]
    shutil.rmtree(checkout / "autofa" / "_native")
    assert [installs(), installs()] == [3, 3]


def test_commands_installed_beside_the_torch_in_use_are_found(checkout: Path) -> None:
    site, tool = (checkout.parent / "theirs" / p for p in ("lib/python3.11/site-packages", "bin/x"))
    own = checkout / ".venv" / "lib" / "python3.11" / "site-packages"
    for folder in (site, tool.parent, own):
        folder.mkdir(parents=True)
    (own / "calling.pth").write_text(f"{site}\n")
    tool.write_text("#!/bin/sh\necho found\n")
    tool.chmod(0o755)
    done = subprocess.run(
        ["bash", "-ec", 'source scripts/_env; ready ""; x'],
        cwd=checkout,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "found\n"
