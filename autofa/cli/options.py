"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import click

from autofa import settings as settings_module
from autofa.errors import UsageError, explain_bad
from autofa.problem import Problem, parse_dtype, parse_shape
from autofa.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

FORMATS = ("simple", "github", "csv", "json", "html")
MODES = ("eager", "graph")


def db_option(function: F) -> F:
    return click.option(
        "--db", metavar="PATH-or-URL", help="Database (default: AUTOFA_DB, else the user's own)."
    )(function)


def device_option(default: str | None = None) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        return click.option(
            "--device", default=default, metavar="cuda:0|cuda|cpu", help="Which device."
        )(function)

    return decorate


def shape_option(*, required: bool = False, multiple: bool = True) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        return click.option(
            "--shape",
            "shapes" if multiple else "shape",
            multiple=multiple,
            required=required,
            metavar="B,H,N,D",
            help="A shape; also B,Hq/Hkv,Nq/Nk,D/Dv." + (" Repeatable." if multiple else ""),
        )(function)

    return decorate


def format_option(formats: Sequence[str] = FORMATS) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        return click.option(
            "--format",
            "form",
            type=click.Choice(formats),
            default="simple",
            show_default=True,
            help="Output form.",
        )(function)

    return decorate


def mode_option(function: F) -> F:
    return click.option(
        "--mode",
        type=click.Choice(MODES),
        default="eager",
        show_default=True,
        help="Rank by the time of a call (eager) or of the device alone (graph).",
    )(function)


def read_settings() -> Settings:
    """The environment's settings; a bad variable is a usage error before any work."""
    return settings_module.load()


def database_of(settings: Settings, db: str | None) -> str:
    """The database to use: the option, else the setting, else the default."""
    if db is not None and not db.strip():
        raise UsageError(explain_bad("--db", db, "a path or an SQLAlchemy URL", "name one"))
    return db if db is not None else settings_module.database(settings)


def problems_of(
    shapes: Sequence[str], dtypes: Sequence[str], causal: bool | None, device_kind: str
) -> tuple[Problem, ...]:
    """Every shape in every dtype, dense, causal or (None) both."""
    masks = {None: ("none", "causal"), True: ("causal",), False: ("none",)}[causal]
    names = [parse_dtype(d) for d in dtypes]
    return tuple(
        replace(parse_shape(shape, dtype=dtype, device=device_kind), mask=mask)
        for shape in shapes
        for dtype in names
        for mask in masks
    )


def default_dtype(device_kind: str) -> str:
    return "f32" if device_kind == "cpu" else "f16"


def echo_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def split_names(text: str | None) -> tuple[str, ...] | None:
    """A comma-separated option as names; None where it was not given."""
    if text is None:
        return None
    names = tuple(n.strip() for n in text.split(",") if n.strip())
    if not names:
        raise UsageError(
            explain_bad("list", text, "names separated by commas", "give at least one")
        )
    return names


def duration(seconds: float) -> str:
    """`7 s`, `3 min 20 s`, `1 h 5 min`: two units at most, never more exact than it is."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
