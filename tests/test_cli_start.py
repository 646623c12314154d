"""Commands that need no torch do not wait for it, and the list of commands loads none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from store_samples import PROBLEM, PROVENANCE, fill, make_row

from autofa.cli import COMMANDS
from autofa.device import cpu_key
from autofa.kernels import REGISTRY
from autofa.kernels.vendor import BASELINE
from autofa.runtime.presence import cuda_driver, torch_version


def run(*arguments: str) -> tuple[str, set[str]]:
    """stdout, and which of the slow packages were loaded."""
    code = (
        "import sys\n"
        "from autofa.cli import _run\n"
        f"assert _run({list(arguments)!r}) == 0\n"
        "print(*{'torch', 'sqlalchemy', 'optuna'}.intersection(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ,
    )
    return done.stdout, set(done.stderr.split())


@pytest.mark.parametrize("arguments", ["--help", "db path", *(f"{c} --help" for c in COMMANDS)])
def test_help_and_paths_load_nothing(arguments: str) -> None:
    loaded = run(*arguments.split())[1]
    assert loaded <= ({"sqlalchemy"} if "report" in arguments else set())


@pytest.mark.skipif(cuda_driver(), reason="where a GPU may be, torch is asked for it")
@pytest.mark.parametrize("limits", [(), ("--limits", "T4")], ids=len)
def test_kernels_loads_nothing(limits: tuple[str, ...]) -> None:
    assert run("kernels", *limits)[1] == set()


def test_report_of_this_cpu_needs_no_torch(tmp_path: Path) -> None:
    import torch

    problem = {**vars(PROBLEM), "device": "cpu", "dtype": "f32"}
    row = make_row(
        BASELINE,
        device=cpu_key(7),
        problem=type(PROBLEM)(**problem),
        fingerprint=f"torch=={REGISTRY.candidate(BASELINE).version()}",
        provenance=type(PROVENANCE)(
            **{**vars(PROVENANCE), "torch": torch.__version__, "driver": ""}
        ),
    )
    fill(tmp_path / "autofa.db", row)
    out, loaded = run("report", "--format", "json")
    (entry,) = json.loads(out)
    assert (entry["units"], entry["current"]) == (7, True)
    assert "torch" not in loaded


def test_the_version_of_torch_is_its_own() -> None:
    import torch

    assert torch_version() == torch.__version__


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_they_say(name: str) -> None:
    command = getattr(import_module(f"autofa.cli.{name}"), name)
    assert isinstance(command, click.Command)
    said = " ".join((command.help or "").split())
    assert said.startswith(COMMANDS[name].rstrip("."))


def test_a_card_is_shown_the_families_of_its_kind() -> None:
    out = run("kernels", "--limits", "T4")[0]
    assert "needs architecture 80 or newer" in out
    assert "cpu.flash" not in out
