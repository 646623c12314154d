"""The family that CONTRIBUTING.md shows is a whole one: declared, compiled and right."""

from __future__ import annotations

import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from cpu_variants import Case, Library, check

from autofa import resources
from autofa.device import cpu_limits
from autofa.kernels.family import KernelFamily

ROOT = Path(__file__).resolve().parent.parent


def shown(language: str) -> str:
    """The one block of that language in the recipe."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipe = text[text.index("## Add a kernel family") :]
    return re.findall(rf"```{language}\n(.*?)```", recipe, re.DOTALL)[0]


@pytest.fixture
def family(tmp_path: Path) -> KernelFamily:
    scope: dict[str, KernelFamily] = {}
    exec(compile(shown("python"), "CONTRIBUTING.md", "exec"), scope)
    declared = scope["FAMILY"]
    folder = tmp_path / "csrc" / "kernels" / declared.folder
    shutil.copytree(resources.csrc_dir() / "include", tmp_path / "csrc" / "include")
    folder.mkdir(parents=True)
    (folder / declared.entry).write_text(shown("cpp"))
    return replace(declared, root=tmp_path / "csrc")


def test_the_family_shown_is_right(family: KernelFamily) -> None:
    limits = cpu_limits()
    rng = random.Random(1)
    ran = []
    for variant in family.legal(Case(70, 33).problem("f32", "none"), limits):
        library = Library(variant, limits)
        for mask in family.domain.masks:
            for case in (Case(70, 33, hq=4), Case(5, 200, scale=-0.5), Case(1, 3, 1, 9)):
                ran.append(check(library, rng, case, mask, threads=2))
    assert sum(ran) >= 15


def test_what_the_recipe_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:tests|autofa|csrc|docs)/[\w/.]+)`", text):
        if "cpu_rows" not in name:
            assert (ROOT / name).exists(), name
