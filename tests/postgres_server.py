"""A PostgreSQL server that the tests start for themselves, and that never outlives them."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

USER, PASSWORD = "autofa", "pa:ss@wo/rd"
_ESCAPED = "pa%3Ass%40wo%2Frd"
_PR_SET_PDEATHSIG = 1
# Tests may kill the server at any moment: what a crash of the machine would cost is no matter.
_OPTIONS = (
    "fsync=off",
    "synchronous_commit=off",
    "full_page_writes=off",
    "listen_addresses=127.0.0.1",
    "max_connections=60",
    "shared_buffers=64MB",
)


def binaries() -> Path | None:
    """The folder of the newest server here. Debian keeps it out of PATH."""
    places = [Path(found).parent for found in [shutil.which("postgres")] if found]
    installed = Path("/usr/lib/postgresql").glob("*/bin")
    places += sorted(installed, key=lambda p: float(p.parent.name), reverse=True)
    wanted = ("postgres", "initdb")
    return next((p for p in places if all((p / name).is_file() for name in wanted)), None)


def missing() -> str | None:
    """Why no server can be tested with; None if one can."""
    if binaries() is None:
        return "no PostgreSQL server in PATH or /usr/lib/postgresql (Debian: package postgresql)"
    if importlib.util.find_spec("psycopg") is None:
        return "no module psycopg: install autofa[postgres]"
    return None


def _account() -> pwd.struct_passwd:
    """Who the server runs as where the tests are root, which it refuses to be."""
    names = {entry.pw_name for entry in pwd.getpwall()}
    return pwd.getpwnam("postgres" if "postgres" in names else "nobody")


def _unprivileged() -> Callable[[], None]:
    """What a child of ours does before it becomes a server."""
    account = _account() if os.getuid() == 0 else None
    libc = ctypes.CDLL(None)

    def drop() -> None:
        if account is not None:
            os.setgroups([])
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
        # Last, since a change of user forgets it: the server goes when the tests do, even killed.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)

    return drop


class Server:
    """One server with databases of its own, at a free port of 127.0.0.1. Use `Server.running`.

    Attributes:
        folder: its data, its log and its socket.
        port: stays the same after a restart.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self._bin = binaries()
        self._drop = _unprivileged()
        self._process: subprocess.Popen[bytes] | None = None
        self._names = (f"test_{number}" for number in itertools.count())
        password = folder / "password"
        password.write_text(PASSWORD)
        if os.getuid() == 0:
            for place in (folder, password):
                os.chown(place, _account().pw_uid, -1)
        made = ["initdb", "-D", "data", "-U", USER, "--pwfile=password", "--auth=scram-sha-256"]
        made += ["--encoding=UTF8", "--locale=C", "--no-sync"]
        self._run(made)

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Server]:
        """A new server, gone with all it had at the end."""
        # Not below pytest's folders, which nobody else may enter, and whose names are too long
        # for a socket.
        with tempfile.TemporaryDirectory(prefix="autofa-pg-") as name:
            server = cls(Path(name))
            try:
                server.start()
                yield server
            finally:
                server.stop()

    def url(self, database: str = "postgres") -> str:
        """Where a database is, with user and password."""
        return f"postgresql+psycopg://{USER}:{_ESCAPED}@127.0.0.1:{self.port}/{database}"

    def sql(self, statement: str, database: str = "postgres") -> None:
        """Runs one statement outside of any transaction."""
        import psycopg

        with psycopg.connect(
            host="127.0.0.1", port=self.port, user=USER, password=PASSWORD, dbname=database,
            autocommit=True, connect_timeout=10,
        ) as connection:  # fmt: skip
            connection.execute(statement)  # type: ignore[arg-type]

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a new and empty database, dropped afterwards."""
        name = next(self._names)
        self.sql(f"CREATE DATABASE {name}")
        try:
            yield self.url(name)
        finally:
            self.sql(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    @contextmanager
    def away(self) -> Iterator[None]:
        """The server is down for as long as the block runs."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def start(self) -> None:
        """Starts it and waits until it answers."""
        assert self._bin is not None
        for _ in range(5):  # somebody else may take the port that was free
            port = self.port or _free_port()
            options = [f"-c{o}" for o in (*_OPTIONS, f"unix_socket_directories={self.folder}")]
            with (self.folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    [self._bin / "postgres", "-D", "data", f"-p{port}", *options],
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # an interrupt of the tests is not for the server
                    preexec_fn=self._drop,
                )
            if self._answers(port):
                self.port = port
                return
        raise RuntimeError((self.folder / "log").read_text()[-2000:])

    def stop(self) -> None:
        """Stops it at once; connections break, what was committed stays."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(10)
        self._process = None

    def _answers(self, port: int) -> bool:
        assert self._process is not None
        status = self.folder / "data" / "postmaster.pid"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self._process.poll() is None:
            # The last line of the file tells; the fourth is the port.
            lines = status.read_text().splitlines() if status.exists() else []
            if len(lines) >= 8 and lines[7].strip() == "ready" and lines[3] == str(port):
                return True
            time.sleep(0.02)
        self.stop()
        return False

    def _run(self, command: list[str]) -> None:
        assert self._bin is not None
        done = subprocess.run(
            [self._bin / command[0], *command[1:]],
            cwd=self.folder,
            capture_output=True,
            text=True,
            preexec_fn=self._drop,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]}: {done.stdout}{done.stderr}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
