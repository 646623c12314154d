"""Which libraries are found again, and which of them are trusted."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from compiler_helpers import requests_of

from autofa.compiler import build, cache, library_of, record_of
from autofa.errors import ToolchainError
from autofa.kernels.family import KernelFamily
from autofa.settings import Settings

MakeFamily = Callable[..., KernelFamily]


def test_an_edited_header_makes_a_new_library(
    tiny_family: MakeFamily, here: Settings, tmp_path: Path
) -> None:
    requests = requests_of(tiny_family(), 3)
    [old] = build(requests, here)
    answer = tmp_path / "csrc" / "kernels" / "tiny" / "answer.h"
    answer.write_text("#pragma once\nconstexpr int kAnswer = 9;\n")
    assert library_of(*requests[0], here) is None
    [new] = build(requests, here)
    assert not new.cached
    assert new.library != old.library
    answer.write_text("#pragma once\nconstexpr int kAnswer = 7;\n")
    [back] = build(requests, here)
    assert (back.cached, back.library) == (True, old.library)


def test_caches_are_private_and_suspect_libraries_are_not_loaded(
    tiny_family: MakeFamily, here: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    requests = requests_of(tiny_family(), 3)
    [result] = build(requests, here)
    library = result.library
    assert library is not None
    for folder in (library.parent, library.parent.parent, library.parent.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    library.chmod(0o666)
    assert library_of(*requests[0], here) is None
    assert "others may write to it" in caplog.text
    library.chmod(0o644)
    library.parent.chmod(0o770)
    assert library_of(*requests[0], here) is None
    library.parent.chmod(0o700)
    assert library_of(*requests[0], here) == library


def test_a_library_of_another_user_is_not_loaded(
    tiny_family: MakeFamily, here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(tiny_family(), 3)
    [result] = build(requests, here)
    assert result.library is not None
    if os.geteuid() == 0:
        os.chown(result.library, 12345, 12345)
    else:
        monkeypatch.setattr(cache.os, "geteuid", lambda: 12345)
    assert library_of(*requests[0], here) is None


def test_a_cache_may_be_named_relative_to_here(
    tiny_family: MakeFamily, here: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = build(requests_of(tiny_family(), 3, 4), replace(here, cache_dir=Path("near")))
    assert [b.status for b in results] == ["ok", "ok"]
    assert len(list((tmp_path / "near").rglob("*.so"))) == 2


def test_a_cache_may_be_carried_to_another_place(
    tiny_family: MakeFamily, here: Settings, tmp_path: Path
) -> None:
    requests = requests_of(tiny_family(), 3)
    build(requests, here)
    (tmp_path / "cache").rename(tmp_path / "carried")
    carried = replace(here, cache_dir=tmp_path / "carried", search_path="")
    [result] = build(requests, carried)
    assert result.cached


def test_prebuilt_libraries_serve_where_the_cache_has_none(
    tiny_family: MakeFamily, here: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(tiny_family(), 3)
    build(requests, here)
    (tmp_path / "cache").rename(tmp_path / "native")
    monkeypatch.setattr(cache, "native_dir", lambda: tmp_path / "native")
    found = library_of(*requests[0], here)
    assert found is not None
    assert found.is_relative_to(tmp_path / "native")
    [result] = build(requests, replace(here, search_path=""))
    assert (result.cached, result.library) == (True, found)


def test_a_cache_that_cannot_be_written(
    tiny_family: MakeFamily, here: Settings, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(ToolchainError, match="set AUTOFA_CACHE_DIR"):
        build(requests_of(tiny_family(), 3), replace(here, cache_dir=blocked))


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    for text in ("", "{bad", "[]", "{}", '{"usage": null, "surprise": 1}'):
        (tmp_path / "x.json").write_text(text)
        assert record_of(tmp_path / "x.so") is None
