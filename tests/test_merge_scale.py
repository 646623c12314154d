"""benchmarks/merge_scale.py makes exports that are sound, and prints a figure for each command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "merge_scale.py"


@pytest.mark.slow
def test_every_cost_is_printed() -> None:
    command = [sys.executable, str(SCRIPT), "--machines", "4", "--kinds", "2", "--rows", "400"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("400 rows of 4 machines")
    names = ["merge", "merge again", "size", "export", "report", "first call"]
    assert [line[2:15].strip() for line in lines[1:]] == names
