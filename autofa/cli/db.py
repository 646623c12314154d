"""`autofa db`: the database as a thing people move between machines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autofa.cli.options import database_of, db_option, read_settings
from autofa.errors import StoreError, UsageError, explain_bad
from autofa.settings import without_secrets

if TYPE_CHECKING:  # loads SQLAlchemy, for which `--help` and `path` need not wait
    from autofa.store.exchange import Found
    from autofa.store.rows import Row

# A file of garbage is not repeated line by line.
_MOST_SAID = 100


@click.group()
def db() -> None:
    """Check, export, import and merge the database of measurements."""


@db.command()
@db_option
def path(db: str | None) -> None:
    """Print the path or URL of the database in use, less a password."""
    click.echo(without_secrets(database_of(read_settings(), db)))


@db.command()
@db_option
def check(db: str | None) -> None:
    """Check the file, its schema and every measurement; exit 3 if some are damaged, 1 if all is.

    A damaged file is renamed to <name>.corrupt-<time>, never deleted.
    """
    from autofa.store.verify import verify

    found = verify(database_of(read_settings(), db))
    if found.moved_aside is not None:
        click.echo(f"error: {found.reason}", err=True)
        click.echo(f"moved aside: {found.moved_aside}", err=True)
        raise click.exceptions.Exit(1)
    if not found.exists:
        click.echo(f"{found.where}: no measurements yet; `autofa tune` makes some")
        return
    devices = len({row.device for row in found.audit.rows})
    count = len(found.audit.rows)
    click.echo(f"{found.where}: {count} sound measurements of {devices} devices")
    _finish([("", found.audit.damaged)], "damaged")


@db.command()
@click.argument("file", default="-")
@click.option("--seed", is_flag=True, help="Only the best per shape, in the form of db/seed.")
@click.option("--device", metavar="NAME", help="Only this device's.")
@db_option
def export(file: str, seed: bool, device: str | None, db: str | None) -> None:
    """Write every measurement as a JSON line with its content hash, in an order of its own.

    FILE is - (stdout) by default.
    """
    from autofa.store import exchange
    from autofa.store.repository import Repository
    from autofa.store.seeds import best_of, seed_text

    location = database_of(read_settings(), db)
    if file != "-":
        exchange.check_target(Path(file))
    with Repository.open(location, write=False) as repository:
        found = repository.audit()
        rows: Sequence[Row] = repository.rows(ok_only=True) if seed else found.rows
    if device is not None:
        keys = {row.device for row in rows if device in (row.device.name, str(row.device))}
        if not keys:
            names = ", ".join(sorted({row.device.name for row in rows})) or "none: it is empty"
            raise UsageError(explain_bad("--device", device, names, "name one of these"))
        rows = [row for row in rows if row.device in keys]
    lines = [seed_text(best_of(rows))] if seed else exchange.export_lines(rows)
    if file != "-":
        exchange.write_lines(lines, Path(file))
    else:
        sys.stdout.writelines(lines)
    if not found.rows:
        click.echo("no measurements yet", err=True)
    _finish([("", found.damaged)], "left out")


@db.command("import")
@click.argument("file")
@db_option
def import_(file: str, db: str | None) -> None:
    """Add the measurements of an export, - for stdin: all of them, or none if it is interrupted.

    Lines that hold none are refused with their reason, and the exit code is 3.
    """
    from autofa.store import exchange

    location = database_of(read_settings(), db)
    if file != "-":
        exchange.check_source(file, "an export, or - for stdin")
        if exchange.is_database(Path(file)):
            do = "`autofa db merge` takes databases"
            raise UsageError(explain_bad("FILE", f"{file}, a database", "an export", do))
    _add(location, [file])


@db.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@db_option
def merge(files: tuple[str, ...], db: str | None) -> None:
    """Add the measurements of databases and exports, each once by its content hash.

    FILEs are read, never changed; - is stdin, and a URL a server's database.
    """
    from autofa.store import exchange

    location = database_of(read_settings(), db)
    for file in files:
        if file != "-" and "://" not in file:
            exchange.check_source(file, "a database, an export, or - for stdin")
    _add(location, files)


def _read(file: str) -> Found:
    from autofa.store import exchange

    if "://" in file or exchange.is_database(Path(file)):
        return exchange.read_database(file)
    try:
        if file == "-":
            return exchange.read_export(sys.stdin.buffer)
        with Path(file).open("rb") as stream:
            return exchange.read_export(stream)
    except OSError as error:
        do = f"name another file ({error.strerror})"
        raise StoreError(explain_bad("FILE", file, "a readable file", do)) from None


def _add(location: str, files: Sequence[str]) -> None:
    from autofa.store.repository import Repository

    with Repository.open(location, write=True) as repository:
        found = [_read(file) for file in files]
        rows = {key: row for source in found for key, row in source.rows.items()}
        new = repository.add(rows.values())
    click.echo(f"{new} new measurements, {len(rows) - new} known already")
    names = [f"{without_secrets(file)}: " for file in files]
    _finish([(name, source.refused) for name, source in zip(names, found, strict=True)], "refused")


def _finish(complaints: Sequence[tuple[str, Sequence[str]]], done: str) -> None:
    """Says what could not be used, and why; then the exit code is 3."""
    said = [f"{name}{reason}" for name, reasons in complaints for reason in reasons]
    for line in said[:_MOST_SAID]:
        click.echo(line, err=True)
    if said:
        click.echo(f"{len(said)} {done}", err=True)
        raise click.exceptions.Exit(3)
