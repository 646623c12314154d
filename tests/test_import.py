"""`import autofa` costs nothing, loads nothing heavy, and shows a small sorted face."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import autofa

HEAVY = ("optuna", "sqlalchemy", "alembic", "click", "rich", "tabulate", "pandas", "matplotlib")


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    names = (*HEAVY, "torch", "numpy", "sqlite3")
    assert run(f"import sys, autofa; print([m for m in {names!r} if m in sys.modules])") == "[]"


def test_the_first_call_loads_none_of_the_tuner() -> None:
    code = (
        "import sys, torch, autofa\n"
        "q = torch.ones(1, 1, 4, 8)\n"
        "with torch.no_grad(): autofa.attention(q, q, q)\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_import_after_torch_is_free() -> None:
    code = (
        "import time, torch\n"
        "start = time.process_time()\n"
        "import autofa\n"
        "print(time.process_time() - start)"
    )
    assert float(run(code)) <= 0.05


def test_the_first_call_sets_off_no_full_collection() -> None:
    """It would take 40 to 90 ms of the 100 ms that a first call may cost."""
    code = (
        "import gc, torch, autofa\n"
        "full = []\n"
        "q = torch.ones(1, 1, 4, 8)\n"
        "gc.freeze(), gc.collect()\n"  # so that what comes is much, beside what is known
        "gc.set_threshold(700, 3, 0)\n"
        "gc.callbacks.append(lambda phase, info: full.append(info['generation'] == 2))\n"
        "with torch.no_grad(): autofa.attention(q, q, q)\n"
        "print(sum(full), gc.isenabled())"
    )
    assert run(code) == "0 True"


def test_all_is_sorted_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert autofa.__all__ == sorted(autofa.__all__)
    for name in autofa.__all__:
        assert getattr(autofa, name) is not None
        assert name in dir(autofa)
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        autofa.nothing_of_this_name  # noqa: B018


def test_what_type_checkers_see_is_what_is_loaded() -> None:
    """The TYPE_CHECKING imports and the lazy table name the same homes."""
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(autofa))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == autofa._HOMES
    assert set(seen) == set(autofa.__all__)


def test_no_submodule_shadows_a_public_name() -> None:
    modules = {info.name for info in pkgutil.iter_modules(autofa.__path__)}
    assert not modules & set(autofa.__all__)
    for name, home in autofa._HOMES.items():
        module = importlib.import_module(home)
        assert getattr(autofa, name) is getattr(module, name)
