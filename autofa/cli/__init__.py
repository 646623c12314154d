"""The command `autofa`: parsing and printing; the work of each command is one call below.

Results go to stdout, everything else to stderr. Exit codes: 0 success, 1 failure, 2 what could be
known before the work, 3 partial, 130 / 143 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys

import click

from autofa.errors import AutofaError

# command -> (module, attribute); a command's module is imported when it is asked for.
COMMANDS = {
    "tune": ("autofa.cli.tune", "tune"),
    "report": ("autofa.cli.report", "report"),
    "bench": ("autofa.cli.bench", "bench"),
    "kernels": ("autofa.cli.kernels", "kernels"),
    "build": ("autofa.cli.build", "build"),
    "explain": ("autofa.cli.explain", "explain"),
    "db": ("autofa.cli.db", "db"),
}


class _Commands(click.Group):
    """Loads each command lazily, so that `--help` and errors answer at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean `{near[0]}`?" if near else "`autofa --help` lists them"
            ctx.fail(f"command: got {args[0]!r}; supported: {', '.join(COMMANDS)}; {hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="autofa", prog_name="autofa")
def cli() -> None:
    """The fastest attention kernel for every shape, measured once per machine."""


def main() -> None:
    """Entry point of the command. Exits with the documented code, never with a traceback for
    what a user can cause."""
    # A terminal that cannot show a character gets a replacement, not an exception.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        code = 130
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except AutofaError as error:
        click.echo(f"error: {error}", err=True)
        code = error.exit_code
    except BrokenPipeError:
        code = 0
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = 0
    if code == 0 and sys.stdout.closed:
        return
    # Python would complain at exit about a reader that went away.
    if isinstance(sys.exc_info()[1], BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code if isinstance(code, int) else 0)
