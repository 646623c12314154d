"""The command `autofa`: parsing and printing; the work of each command is one call below.

Results go to stdout, everything else to stderr. Exit codes: 0 success, 1 failure, 2 what could be
known before the work, 3 partial, 130 / 143 interrupted.
"""

from __future__ import annotations

import importlib
import sys

import click

from autofa._version import __version__
from autofa.cli.streams import Output
from autofa.errors import AutofaError

# command -> its first line of help; `autofa.cli.<command>` is imported when it is asked for.
COMMANDS = {
    "tune": "Measure every candidate kernel and keep the results.",
    "report": "Print the leaderboard: per shape, every kernel measured, best first.",
    "bench": "Build, check and time every kernel at one shape, side by side.",
    "kernels": "The kernel families, their parameters, constraints and legal variants.",
    "build": "Compile variants ahead of time and print what each uses.",
    "explain": "Say which kernel `autofa.attention` uses for a shape.",
    "doctor": "Say what was found here, what is wrong with it, and how to mend that.",
    "db": "Check, export, import and merge the database of measurements.",
}


class _Commands(click.Group):
    """Loads each command lazily, so that `--help` and errors answer at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"autofa.cli.{name}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

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
@click.version_option(__version__, prog_name="autofa")
def cli() -> None:
    """The fastest attention kernel for every shape, measured once per machine."""


def _run(arguments: list[str]) -> int:
    """Runs the command; gives its exit code. Only programming errors escape."""
    try:
        # Not cli.main(): it exits by itself, with codes of its own.
        with cli.make_context("autofa", arguments) as context:
            cli.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as stop:
        click.echo("interrupted", err=True)
        return 128 + getattr(stop, "number", 2)
    except AutofaError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    return 0


def main() -> None:
    """Entry point of the command. Exits with the documented code, and without a traceback for
    whatever a user can cause."""
    output = Output()
    sys.exit(output.finish(_run(sys.argv[1:])))
