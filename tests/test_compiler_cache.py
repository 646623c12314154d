"""Which libraries are found again, and which of them are trusted."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from compiler_helpers import calls, requests_of

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


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zeroed(path: Path) -> None:
    stamp = path.stat()
    path.write_bytes(bytes(stamp.st_size))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").touch()


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES = [truncated, zeroed, emptied, a_pipe, a_folder, dangling, Path.unlink]


@pytest.mark.parametrize("suffix", [".so", ".json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_a_miss_and_built_once_more(
    tiny_family: MakeFamily,
    fake_cxx: Callable[[str], Settings],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    damage: Callable[[Path], None],
    suffix: str,
) -> None:
    here = fake_cxx('exec $real "$@"')
    requests = requests_of(tiny_family(), 3, 4)
    results = build(requests, here, jobs=1)
    assert library_of(*requests[0], here) == results[0].library
    for result in results:
        assert result.library is not None
        damage(result.library.with_suffix(suffix))
    assert [library_of(*request, here) for request in requests * 2] == [None] * 4
    assert len(caplog.records) <= 1
    again = build(requests, here, jobs=1)
    assert [(b.status, b.cached) for b in again] == [("ok", False)] * 2
    assert [b.library for b in again] == [b.library for b in results]
    assert [library_of(*request, here) for request in requests] == [b.library for b in results]
    assert all(b.cached for b in build(requests, here, jobs=1))
    assert calls(tmp_path) == 4


def test_a_library_that_is_being_replaced_is_missing_and_not_damaged(
    tiny_family: MakeFamily,
    here: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = requests_of(tiny_family(), 3)
    (old,) = build(requests, here)
    real = Path.rename
    seen: list[Path | None] = []

    def rename(self: Path, target: Path) -> Path:
        renamed = real(self, target)
        seen.append(library_of(*requests[0], here))
        return renamed

    monkeypatch.setattr(Path, "rename", rename)
    (new,) = build(requests, here, anew=True)
    assert not new.cached
    assert seen == [None, old.library]
    assert not caplog.records


def test_a_whole_library_is_read_once(
    tiny_family: MakeFamily, here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(tiny_family(), 3)
    build(requests, here)
    assert library_of(*requests[0], here)
    monkeypatch.setattr(cache, "_difference", None)
    assert library_of(*requests[0], here)


def test_a_prebuilt_library_is_as_suspect(
    tiny_family: MakeFamily, here: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(tiny_family(), 3)
    [result] = build(requests, here)
    (tmp_path / "cache").rename(tmp_path / "native")
    monkeypatch.setattr(cache, "native_dir", lambda: tmp_path / "native")
    prebuilt = library_of(*requests[0], here)
    assert prebuilt is not None
    truncated(prebuilt)
    assert library_of(*requests[0], here) is None
    assert build(requests, here)[0].library == result.library


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
