"""What is shown of a database's location: nothing that lets anyone in."""

from __future__ import annotations

import logging

import pytest

from autofa.device import cpu_key
from autofa.dispatch import evidence
from autofa.settings import Settings, without_secrets


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("/home/u/autofa.db", "/home/u/autofa.db"),
        ("sqlite:////home/u/a=b@c.db", "sqlite:////home/u/a=b@c.db"),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        ("postgresql://u@host/db", "postgresql://u@host/db"),
        ("postgresql://u:secret@host:5432/db", "postgresql://u:***@host:5432/db"),
        ("postgresql://u:secret@or/secret?secret@host/db", "postgresql://u:***@host/db"),
        (
            "postgresql+psycopg://host/db?password=secret&sslmode=require",
            "postgresql+psycopg://host/db?password=***&sslmode=***",
        ),
        ("mysql://:secret@host/db", "mysql://:***@host/db"),
    ],
)
def test_a_location_without_its_secrets(location: str, shown: str) -> None:
    assert without_secrets(location) == shown


def test_what_dispatch_says_of_a_server_holds_no_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = "postgresql://u:secret@host/db?password=secret"

    def fail(location: str, device: object) -> list[object]:
        raise ValueError(f"cannot use {location}")

    monkeypatch.setattr(evidence, "_rows", fail)
    with caplog.at_level(logging.INFO, "autofa"):
        found = evidence.gather(cpu_key(1), Settings(db=url))
        monkeypatch.setattr(evidence, "_rows", lambda location, device: [])
        evidence.gather(cpu_key(1), Settings(db=url))
    assert "postgresql://u:***@host/db" in found.lost
    assert caplog.text.count("***@host") >= 2
    assert "secret" not in caplog.text + found.lost
