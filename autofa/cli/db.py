"""`autofa db`: the database as a thing people move between machines."""

from __future__ import annotations

import click

from autofa.cli.options import database_of, db_option, read_settings
from autofa.settings import without_secrets


@click.group()
def db() -> None:
    """Where the measurements are."""


@db.command()
@db_option
def path(db: str | None) -> None:
    """Print the path or URL of the database in use, less a password."""
    click.echo(without_secrets(database_of(read_settings(), db)))
