"""Measurements on a server: no call waits for them, and none is wrong or lost without them."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
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
from runtime_variants import require_runtime
from sqlalchemy import create_engine, text
from store_processes import in_processes

import autofa
from autofa.dispatch import evidence, state
from autofa.dispatch.table import Table
from autofa.runtime import extension
from autofa.store.repository import Repository

SHAPE = problem("1,2,33,16")
AT_ONCE = 0.5


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> None:
    require_runtime()


@pytest.fixture(autouse=True)
def _fresh(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.WARNING, logger="autofa")
    built(flash())
    state.reload()
    extension.set_miss(state._miss)  # tests of the runtime put their own in its place
    with torch.no_grad(), no_defaults():
        yield
    state.reload()


def table() -> Table:
    assert state.STATE.table is not None
    return state.STATE.table


def own() -> int:
    return extension.counters()["own"]


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFA_DB", url)
    state.reload()


@pytest.fixture
def served(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A server in use whose rows say that our kernel wins `SHAPE`."""
    with Repository.open(postgres_url, write=True) as repository:
        repository.add(tuned(SHAPE))
    use(postgres_url, monkeypatch)
    return postgres_url


# ---- once they are read ----


@pytest.mark.postgres
def test_winners_are_used_once_they_are_read(
    served: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()
    read = evidence._rows

    def slow(*arguments: object) -> object:
        assert go.wait(20)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(evidence, "_rows", slow)
    q, k, v = inputs(SHAPE)
    before = own()
    for _ in range(3):
        assert_close(autofa.attention(q, k, v), reference(q, k, v))
    assert own() == before  # nothing is known yet
    go.set()
    assert table().wait(20)
    for _ in range(3):
        assert_close(autofa.attention(q, k, v), reference(q, k, v))
    assert own() == before + 3
    assert table().counts.reads == 1
    assert not caplog.records


@pytest.mark.postgres
def test_who_can_wait_speaks_of_what_the_server_says(served: str) -> None:
    assert autofa.explain(*inputs(SHAPE)).rung == "measured"
    state.reload()
    (found,) = autofa.warmup()
    assert found.kernel == flash().slug
    before = own()
    autofa.attention(*inputs(SHAPE))
    assert own() == before + 1


@pytest.mark.postgres
def test_a_deterministic_answer_does_not_depend_on_who_is_first(served: str) -> None:
    before = own()
    torch.use_deterministic_algorithms(True)
    try:
        state.reload()
        autofa.attention(*inputs(SHAPE))
    finally:
        torch.use_deterministic_algorithms(False)
    assert own() == before + 1


@pytest.mark.postgres
def test_calls_with_gradients_keep_their_kernel_and_it_is_said(
    served: str, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(SHAPE))
    before = own()
    with torch.enable_grad():
        for turn in range(4):
            autofa.attention(q, k, v).sum().backward()
            assert table().wait(20)
            if turn == 1:
                assert own() == before  # two forwards of one checkpoint must not differ
                assert "`autofa.reload()` between two steps" in caplog.records[0].message
                autofa.reload()
                autofa.warmup()
    assert own() == before + 2
    assert len(caplog.records) == 1


@pytest.mark.postgres
def test_a_forked_process_reads_for_itself(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forked = threading.Event()
    parent = os.getpid()
    read = evidence._rows

    def slow(*arguments: object) -> object:
        assert os.getpid() != parent or forked.wait(20)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(evidence, "_rows", slow)
    autofa.attention(*inputs(SHAPE))

    def work(number: int) -> None:
        assert table().wait(20)
        before = own()
        autofa.attention(*inputs(SHAPE))
        assert own() == before + 1

    assert in_processes(1, work) == []
    forked.set()
    assert table().wait(20)


# ---- faults: right answers at once, one warning ----


@contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port whose connections are handed to `answer`, and stay open."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def take() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return
                answer(taken[-1])

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in taken:
                connection.close()


@contextmanager
def nobody() -> Iterator[str]:
    yield "postgresql+psycopg://u:secret@127.0.0.1:1/db"


@contextmanager
def silence() -> Iterator[str]:
    with listening(lambda connection: None) as port:
        yield f"postgresql://u:secret@127.0.0.1:{port}/db"


@contextmanager
def garbage() -> Iterator[str]:
    with listening(lambda connection: connection.sendall(b"HTTP/1.1 400\r\n\r\n")) as port:
        yield f"postgresql://u:secret@127.0.0.1:{port}/db"


@contextmanager
def no_url() -> Iterator[str]:
    yield "postgresql://u:secret@127.0.0.1:port/db"


@contextmanager
def another_kind() -> Iterator[str]:
    yield "mysql://u:secret@127.0.0.1/db"


FAULTS = {
    "dead": (nobody, "check that the server runs and lets this user in"),
    "silent": (silence, "timeout"),
    "no PostgreSQL": (garbage, "check that the server runs"),
    "no URL": (no_url, "check the URL"),
    "not supported": (another_kind, "supported: a path"),
}


def assert_only_warned(
    url: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers are right and come at once, and one warning in all says what is lost and to do."""
    shapes = [problem(f"1,2,{n},16") for n in (33, 70, 150)]
    expected = [reference(*inputs(shape)) for shape in shapes]
    use(url, monkeypatch)
    started = time.monotonic()
    got = [autofa.attention(*inputs(shape)) for shape in shapes]
    assert time.monotonic() - started < AT_ONCE
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other)
    other_device = replace(table().place("cpu", 1).device, units=7)
    table().evidence_of(other_device)
    assert table().wait(20)
    found = autofa.explain(*inputs(shapes[0]))
    assert (found.rung, said in found.reason) == ("sdpa", True)
    assert len(caplog.records) == 1
    message = caplog.records[0].message
    assert message.startswith("stored measurements are not used: ")
    assert said in message
    assert message.endswith("`autofa doctor` says what to do")
    for secret in ("secret", "wo/rd", "wo%2Frd"):
        assert secret not in caplog.text + found.to_json()


@pytest.mark.parametrize("name", FAULTS)
def test_a_server_that_cannot_be_used(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("autofa.store.server_reader.CONNECT_TIMEOUT", 2)
    monkeypatch.setattr(evidence, "READ_LIMIT", 1.0)
    fault, said = FAULTS[name]
    with fault() as url:
        assert_only_warned(url, said, monkeypatch, caplog)


@pytest.mark.postgres
def test_a_server_that_lets_nobody_in(
    served: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = served.replace("pa%3A", "secret%3A")
    assert_only_warned(wrong, "authentication failed", monkeypatch, caplog)


@pytest.mark.postgres
def test_a_server_that_stops_between_question_and_answer(
    served: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(evidence, "READ_LIMIT", 0.5)
    engine = create_engine(served)
    with engine.connect() as other:
        other.execute(text("LOCK TABLE autofa_measurement IN ACCESS EXCLUSIVE MODE"))
        assert_only_warned(served, "check that the server runs", monkeypatch, caplog)
    engine.dispose()


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("UPDATE autofa_alembic_version SET version_num = '9999'", "newer autofa"),
        ("DROP VIEW autofa_dispatch", "makes it anew"),
        ("DROP TABLE autofa_measurement CASCADE", "makes it anew"),
    ],
)
def test_tables_of_another_version(
    served: str,
    change: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = create_engine(served)
    with engine.begin() as connection:
        connection.execute(text(change))
    engine.dispose()
    assert_only_warned(served, said, monkeypatch, caplog)


@pytest.mark.postgres
def test_an_empty_server_is_no_fault(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(postgres_url, monkeypatch)
    autofa.attention(*inputs(SHAPE))
    assert table().wait(20)
    assert not caplog.records


def test_a_server_that_sends_late_changes_nothing_after_a_reload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go = threading.Event()

    def slow(location: str, device: object) -> list[object]:
        assert go.wait(20)
        return list(tuned(SHAPE))

    monkeypatch.setattr(evidence, "_rows", slow)
    use("postgresql://u@h/db", monkeypatch)
    q, k, v = inputs(SHAPE)
    autofa.attention(q, k, v)
    old = table()
    monkeypatch.setattr(evidence, "_rows", lambda location, device: [])
    use("autofa-elsewhere.db", monkeypatch)
    autofa.attention(q, k, v)
    go.set()
    assert old.wait(20)
    before = own()
    autofa.attention(q, k, v)
    assert own() == before


# ---- the first call of a process ----

# Forks what has imported all and called nothing, so that each child's call is its first.
FIRST_CALLS = """
import os, sys, time, torch, autofa
torch.set_grad_enabled(False)
for _ in range(3):
    for name in ("without", "served", "silent"):
        if os.fork():
            os.wait()
            continue
        os.environ["AUTOFA_DB"] = os.environ[name]
        q, k, v = (torch.zeros(1, 2, 33, 16) for _ in range(3))
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
        start = time.perf_counter()
        autofa.attention(q, k, v)
        print(name, time.perf_counter() - start, flush=True)
        os._exit(0)
"""


@pytest.mark.postgres
def test_the_first_call_is_no_slower_than_without_a_database(served: str, tmp_path: Path) -> None:
    with silence() as silent:
        environment = {**os.environ, "without": str(tmp_path / "none.db"), "served": served}
        said = subprocess.check_output(
            [sys.executable, "-c", FIRST_CALLS], env={**environment, "silent": silent}, text=True
        )
    found: dict[str, list[float]] = {}
    for name, seconds in map(str.split, said.splitlines()):
        found.setdefault(name, []).append(float(seconds))
    best = {name: min(times) for name, times in found.items()}
    print(best)
    # On a Xeon 0.10 s each, most of it imports; 0.13 with psycopg's import beside them.
    assert max(best["served"], best["silent"]) < 1.5 * best["without"] + 0.02
