"""attention() beside a database that breaks while it is used, or that is another user's."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from copying_compiler import CopyingCompiler
from dispatch_world import inputs
from fault_world import SHAPES, World, right_answers, tuned_world, warnings
from runtime_variants import require_runtime

import autofa
from autofa import settings
from autofa.dispatch import state


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> None:
    require_runtime()


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[World]:
    with tuned_world(tmp_path, monkeypatch, caplog) as found:
        yield found


def gone(path: Path) -> None:
    path.unlink()


def with_its_folder(path: Path) -> None:
    path.unlink()
    path.parent.rename(path.parent.with_name("away"))


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE autofa_alembic_version SET version_num = '9999'")


LATER = {
    "deleted": (gone, ""),
    "its folder moved": (with_its_folder, ""),
    "zero bytes": (lambda path: os.truncate(path, 0), ""),
    "a directory": (a_directory, "a directory"),
    "cut": (cut, "an intact SQLite file"),
    "newer": (newer, "9999"),
}


@pytest.mark.parametrize("fault", list(LATER))
def test_a_database_that_breaks_while_it_is_used(
    fault: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.fill(world.cache)
    path = world.root / "data" / "autofa.db"
    path.parent.mkdir()
    shutil.move(os.environ["AUTOFA_DB"], path)
    world.monkeypatch.setenv("AUTOFA_DB", str(path))
    state.reload()
    q, k, v = inputs(SHAPES[0])
    autofa.attention(q, k, v)
    damage, words = LATER[fault]
    damage(path)
    # What has been read is kept.
    assert right_answers() == len(SHAPES)
    assert warnings(caplog) == []
    # Read anew, it is a fault like any other.
    autofa.reload()
    assert right_answers() == 0
    said = warnings(caplog)
    assert len(said) == (1 if words else 0), said
    for message in said:
        assert words in message
        assert str(path) in message
        assert "stored measurements are not used" in message
        assert "autofa doctor" in message


@pytest.mark.parametrize("mode", ["exclusive transaction", "exclusive locking of a log"])
def test_a_database_that_another_has_locked(
    mode: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.fill(world.cache)
    path = Path(settings.database(settings.load()))
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        log = mode == "exclusive locking of a log"
        writer.execute(f"PRAGMA journal_mode={'WAL' if log else 'DELETE'}")
        writer.execute("PRAGMA locking_mode=EXCLUSIVE")
        writer.execute("BEGIN EXCLUSIVE")
        writer.execute("UPDATE autofa_device SET units = units")
        state.reload()
        assert right_answers(seconds=1.0) == 0
        writer.execute("ROLLBACK")
    (said,) = warnings(caplog)
    assert "lock held by another" in said
    autofa.reload()
    assert right_answers() == len(SHAPES)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("what", ["database", "folder"])
def test_a_database_that_may_not_be_read(
    what: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(os.environ["AUTOFA_DB"])
    (path if what == "database" else path.parent).chmod(0)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
            os.setuid(65534)
            state.reload()
            right_answers()
            (said,) = warnings(caplog)
            code = 0 if "permissions" in said and "autofa doctor" in said else 2
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    path.parent.chmod(0o755)
    assert status == 0


# ---- other users ----

_ASK = """
import pathlib, torch, autofa
from autofa.compiler import cache
from autofa.dispatch import state
from autofa.kernels import REGISTRY
from autofa.runtime import extension
from torch.nn.functional import scaled_dot_product_attention as sdpa
cache.native_dir = lambda: pathlib.Path("/nonexistent")
for family in REGISTRY.families:
    object.__setattr__(family, "unmeasured", lambda problem, limits: False)
torch.manual_seed(0)
torch.set_grad_enabled(False)
for _ in range(2):
    for n in (33, 130):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = (torch.randn(1, 2, n, 16).to(dtype) for _ in range(3))
            want = sdpa(q.float(), k.float(), v.float())
            assert torch.allclose(autofa.attention(q, k, v).float(), want, atol=3e-2)
    assert state.STATE.table.wait(30)
print(extension.counters()["own"])
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="autofa-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


_NOBODY = "65534"
# Without rights of root's but one: to read this installation, which may lie in root's home.
_DROP = (
    "setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups",
    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
)  # fmt: skip


def as_another_user(folder: Path) -> tuple[int, list[str]]:
    """Calls of all kinds, twice, by a user who may write nothing of root's: how many of them an own
    kernel answered, and what was warned of."""
    home = folder / "home"
    home.mkdir()
    start: tuple[str, ...] = (sys.executable, "-c")
    if os.geteuid() == 0:
        os.chown(home, int(_NOBODY), int(_NOBODY))
        start = (*_DROP, *start)
        if shutil.which("setpriv") is None or run(*start, "import autofa", home=home).returncode:
            pytest.skip("setpriv is not there, or may not drop root's rights")
    done = run(*start, _ASK, home=home)
    assert done.returncode == 0, done.stderr
    return int(done.stdout), done.stderr.strip().splitlines()


def run(*command: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HOME": str(home),
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment, cwd="/"
    )


def give(folder: Path, *, writable: bool) -> None:
    """Makes a folder another user's, or one that it may read only."""
    for path in (folder, *folder.rglob("*")):
        if os.geteuid() == 0 and writable:
            os.chown(path, 65534, 65534)
        if not writable:
            path.chmod(0o555 if path.is_dir() else 0o444)


def test_a_cache_and_database_copied_to_another_place_and_user_are_used(
    world: World, public: Path
) -> None:
    compiler = CopyingCompiler(public / "compiler", world.libraries)
    world.monkeypatch.setenv("CXX", str(compiler.command))
    world.fill(public / "their cache")
    shutil.copy(os.environ["AUTOFA_DB"], public / "their.db")
    give(public / "their cache", writable=True)
    world.monkeypatch.setenv("AUTOFA_DB", str(public / "their.db"))
    world.keep_cache_in(public / "their cache")
    assert as_another_user(public) == (2 * len(SHAPES), [])
    assert compiler.runs == 0


def test_a_cache_and_database_of_root_that_others_may_only_read_are_used(
    world: World, public: Path
) -> None:
    (public / "data").mkdir()
    path = public / "data" / "autofa.db"
    shutil.copy(os.environ["AUTOFA_DB"], path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    world.fill(public / "cache")
    give(public / "data", writable=False)
    give(public / "cache", writable=False)
    world.monkeypatch.setenv("AUTOFA_DB", str(path))
    world.keep_cache_in(public / "cache")
    assert as_another_user(public) == (2 * len(SHAPES), [])
    for part in (public / "data", public / "cache"):
        part.chmod(0o755)


def test_a_cache_that_may_not_be_written_is_one_warning(world: World, public: Path) -> None:
    (public / "cache").mkdir(mode=0o555)
    compiler = CopyingCompiler(public / "compiler", ())
    world.monkeypatch.setenv("CXX", str(compiler.command))
    shutil.copy(os.environ["AUTOFA_DB"], public / "their.db")
    world.monkeypatch.setenv("AUTOFA_DB", str(public / "their.db"))
    world.keep_cache_in(public / "cache" / "deeper")
    own, (said,) = as_another_user(public)
    assert own == 0
    assert "Permission denied" in said
    assert "set AUTOFA_CACHE_DIR" in said
    assert "autofa doctor" in said
