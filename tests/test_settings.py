"""What is shown of a database's location: nothing that lets anyone in."""

from __future__ import annotations

import logging

import pytest

from autofa import settings
from autofa.device import cpu_key
from autofa.dispatch import evidence
from autofa.errors import StoreError, UsageError
from autofa.settings import Settings, without_secrets
from autofa.store.reader import sqlite_path


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


BAD = {
    "MAX_JOBS": ("0", "abc", "-1", "1.5", "\u00b2", "9" * 5000),
    "AUTOFA_PRECISION": ("f64",),
    "AUTOFA_LOG": ("loud",),
    "AUTOFA_DISABLE": ("maybe",),
    "AUTOFA_CACHE_DIR": ("~nobody-of-this-name/cache",),
    "CUDA_HOME": ("~nobody-of-this-name/cuda",),
    "CXX": ("g++ 'open", "g++ \\"),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_a_bad_value_costs_that_setting_only(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("AUTOFA_DB", "mine.db")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=name):
        settings.load()
    found, (complaint,) = settings.load_usable()
    assert found.db == "mine.db"
    assert name in str(complaint)
    field = name.removeprefix("AUTOFA_").lower()
    assert getattr(found, field) == getattr(Settings(), field)


def test_all_bad_values_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in BAD.items():
        monkeypatch.setenv(name, values[0])
    complaints = settings.load_usable()[1]
    assert len(complaints) == len(BAD)
    for name in BAD:
        assert any(name in str(complaint) for complaint in complaints)


def test_a_good_environment_reads_the_same_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AUTOFA_CACHE_DIR": "~/cache", "AUTOFA_DISABLE": "ON", "MAX_JOBS": " 07 ",
        "CXX": "ccache 'my g++'",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    found = settings.load()
    assert (found, ()) == settings.load_usable()
    assert (found.disable, found.max_jobs, found.cxx) == (True, 7, ("ccache", "my g++"))
    assert found.cache_dir is not None
    assert found.cache_dir.is_absolute()


def test_a_database_of_an_unknown_user() -> None:
    with pytest.raises(StoreError, match="~USER of a known user"):
        sqlite_path("~nobody-of-this-name/autofa.db")
