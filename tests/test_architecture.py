"""The layer table of docs/architecture.md: imports go down, fences hold, files stay small."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autofa"

LAYERS = {
    "errors": 0,
    "settings": 0,
    "problem": 0,
    "device": 0,
    "resources": 0,
    "collector": 0,
    "_version": 0,
    "kernels": 1,
    "compiler": 2,
    "store": 2,
    "runtime": 2,
    "bench": 3,
    "dispatch": 3,
    "tuning": 4,
    "reporting": 4,
    "diagnosis": 4,
    "cli": 5,
    "integrations": 5,
    "__main__": 6,
}
FENCES = {
    "optuna": {"tuning"},
    "sqlalchemy": {"store"},
    "alembic": {"store"},
    "torch": {"runtime", "bench", "dispatch", "integrations"},
    "click": {"cli"},
    "rich": {"cli"},
    "tabulate": {"reporting", "cli"},
}
MAX_LINES = {".py": 400, ".cpp": 400, ".h": 400, ".cu": 300, ".cuh": 330}

# The files of layer 0 are one package in all but name: each may import those listed before it.
_FILES_IN_ORDER = [part for part, layer in LAYERS.items() if layer == 0]


def _place(part: str) -> tuple[int, int]:
    return LAYERS[part], _FILES_IN_ORDER.index(part) if part in _FILES_IN_ORDER else 0


MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "_resources" not in p.parts)


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> list[str]:
    """Absolute names of all imports, those inside functions too; typing-only ones left out."""
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the absolute name"
            base = node.module or ""
            for alias in node.names:
                submodule = ROOT / Path(*base.split(".")) / f"{alias.name}.py"
                is_module = submodule.exists() or submodule.with_suffix("").is_dir()
                found.append(f"{base}.{alias.name}" if is_module else base)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_to_lower_layers(path: Path) -> None:
    part = part_of(module_name(path))
    if part == "__init__":
        return  # the face re-exports lazily from every layer
    assert part in LAYERS, f"{part} has no layer: add it here and to docs/architecture.md"
    for name in imports_of(path):
        if name.split(".")[0] != "autofa" or name == "autofa":
            continue
        other = part_of(name)
        assert other == part or _place(other) < _place(part), (
            f"{module_name(path)} (layer {LAYERS[part]}) imports {name} (layer {LAYERS[other]})"
        )


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_fences(path: Path) -> None:
    part = part_of(module_name(path))
    for name in imports_of(path):
        allowed = FENCES.get(name.split(".")[0])
        if allowed is not None:
            assert part in allowed, f"{path.relative_to(ROOT)} imports {name}; only {allowed} may"


def test_no_import_circles() -> None:
    graph = {module_name(p): {n for n in imports_of(p) if n.startswith("autofa")} for p in MODULES}
    state: dict[str, int] = {}

    def visit(node: str, trail: tuple[str, ...]) -> None:
        assert state.get(node) != 1, f"import circle: {' -> '.join((*trail, node))}"
        if state.get(node) == 2:
            return
        state[node] = 1
        for target in sorted(graph.get(node, ())):
            if target != "autofa" and target != node:
                visit(target, (*trail, node))
        state[node] = 2

    for name in sorted(graph):
        if name != "autofa":
            visit(name, ())


def test_files_stay_small() -> None:
    sources = [*MODULES, *(p for p in (ROOT / "csrc").rglob("*") if p.suffix in MAX_LINES)]
    long = {
        str(p.relative_to(ROOT)): lines
        for p in sources
        if (lines := len(p.read_text().splitlines())) > MAX_LINES[p.suffix]
    }
    assert not long


def test_no_submodule_hides_a_public_function() -> None:
    import autofa

    submodules = {p.stem for p in PACKAGE.glob("*.py")} | {
        p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()
    }
    assert not submodules & set(autofa.__all__)


def test_families_never_include_each_other() -> None:
    families = {p.name for p in (ROOT / "csrc" / "kernels").iterdir() if p.is_dir()}
    for source in (ROOT / "csrc" / "kernels").rglob("*.*"):
        own = source.relative_to(ROOT / "csrc" / "kernels").parts[0]
        included = re.findall(r'#include "kernels/(\w+)/', source.read_text())
        assert set(included) <= {own}, source
        assert not (set(included) - families), source
