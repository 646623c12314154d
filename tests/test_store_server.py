"""The same by a PostgreSQL server."""

from __future__ import annotations

import pytest
from store_processes import in_processes
from store_samples import CPU, H200, PROBLEM, at, failed, make_row
from test_store_exchange import history, parse

from autofa.cli import _run
from autofa.store.exchange import export_lines
from autofa.store.repository import Repository
from autofa.store.verify import verify

pytestmark = pytest.mark.postgres


@pytest.fixture
def url(postgres_url: str) -> str:
    return postgres_url


def test_many_first_processes_lose_nothing(url: str) -> None:
    def work(number: int) -> None:
        for turn in range(5):
            mine = make_row(f"test.kernel-{number}", run=f"{turn}")
            with Repository.open(url, write=True) as repository:
                assert 1 <= repository.add([mine, make_row(run=f"{turn}")]) <= 2
                assert mine in repository.rows(H200)

    assert in_processes(8, work) == []
    found = verify(url)
    assert (len(found.audit.rows), found.audit.damaged) == (8 * 5 + 5, ())


def test_rows_come_back_exactly_and_travel(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        *history(0),
        failed("torch.flash", message="odd: \0 \udc80 \U0001f600 ' \" ; --"),
        make_row("torch.cudnn", 0.1 + 0.2, error=None, provenance=at(3)),
        make_row("cpu.x", 1e-9, device=CPU, seconds=1e-300, problem=PROBLEM.__class__(
            "f32", 1, 8, 8, 1024, 1024, 64, 64, device="cpu")),
    }  # fmt: skip
    with Repository.open(url, write=True) as repository:
        assert repository.add(rows) == len(rows)
        assert set(repository.rows()) == rows
    text = "".join(export_lines(rows))
    assert _run(["db", "export", "--db", url]) == 0
    assert capsys.readouterr().out == text
    assert _run(["db", "merge", url]) == 0
    assert capsys.readouterr().out == f"{len(rows)} new measurements, 0 known already\n"
    assert set(parse(text)[0]) == rows
    assert _run(["db", "check", "--db", url]) == 0
