"""A tuned machine whose compiler, cache and database a test breaks, and what calls then give."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from copying_compiler import CopyingCompiler
from dispatch_world import (
    assert_close,
    built,
    flash,
    inputs,
    no_defaults,
    problem,
    reference,
    tuned,
)
from store_samples import fill

import autofa
from autofa.compiler import cache
from autofa.dispatch import state
from autofa.dispatch.table import Table
from autofa.runtime import extension

# Two kinds of calls per dtype: two libraries, each the winner in more than one bucket.
SHAPES = [problem(f"1,2,{n},16", dtype=dtype) for n in (33, 130) for dtype in ("f32", "bf16")]


@dataclass
class World:
    """A tuned machine whose winners are not built yet; their compiler is a copier."""

    root: Path
    libraries: tuple[Path, ...]
    monkeypatch: pytest.MonkeyPatch

    @property
    def cache(self) -> Path:
        return Path(os.environ["AUTOFA_CACHE_DIR"])

    def keep_cache_in(self, folder: Path | str) -> Path:
        self.monkeypatch.setenv("AUTOFA_CACHE_DIR", str(folder))
        return Path(folder)

    def compile_with(self, first: str = "") -> CopyingCompiler:
        compiler = CopyingCompiler(self.root / "compiler", self.libraries, first)
        self.monkeypatch.setenv("CXX", str(compiler.command))
        return compiler

    def fill(self, folder: Path) -> None:
        """Puts the winners' libraries into the cache at `folder`."""
        place = folder / "variants" / self.libraries[0].parent.name
        place.mkdir(parents=True, mode=0o700)
        for library in self.libraries:
            for suffix in (".so", ".json"):
                shutil.copy2(library.with_suffix(suffix), place)


@contextmanager
def tuned_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[World]:
    """A machine of this test's own; nothing is prebuilt, and no default answers unmeasured."""
    caplog.set_level(logging.WARNING, logger="autofa")
    libraries = (built(flash()), built(flash("bf16")))
    found = World(tmp_path, libraries, monkeypatch)
    found.keep_cache_in(tmp_path / "cache")
    found.compile_with()
    monkeypatch.setattr(cache, "native_dir", lambda: tmp_path / "none")
    cache._said.clear()
    fill(Path(os.environ["AUTOFA_DB"]), *(row for shape in SHAPES for row in tuned(shape)))
    state.reload()
    with torch.no_grad(), no_defaults():
        yield found
    state.reload()


def live() -> Table:
    found = state.STATE.table
    assert found is not None
    return found


def right_answers(seconds: float = 2.0) -> int:
    """Asks all kinds of calls; gives how many measured ones an own kernel answered."""
    own = 0
    for shape in SHAPES:
        q, k, v = inputs(shape)
        for causal in (False, True):
            before = extension.counters()["own"]
            started = time.monotonic()
            got = autofa.attention(q, k, v, is_causal=causal)
            assert time.monotonic() - started < seconds
            if not causal:  # the others are predicted, or not
                own += extension.counters()["own"] - before
            assert_close(got, reference(q, k, v, is_causal=causal))
    return own


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
