"""`autofa doctor`: what was found on this machine, each problem with its cure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

import click

from autofa.cli.options import echo_json, format_option

if TYPE_CHECKING:
    from autofa.diagnosis.finding import Finding

_MARKS = {"ok": "ok", "info": "-", "problem": "PROBLEM"}


@click.command()
@format_option(("simple", "json"))
def doctor(form: str) -> None:
    """Say what was found here, what is wrong with it, and how to mend that.

    Looks at settings, torch, GPUs, database, compilers and cache, and changes nothing. Exit code 1
    where something keeps autofa from working or makes it slow without a word, else 0: a GPU that is
    not there is no problem, nor is a compiler where nothing is left to compile.
    """
    from autofa.diagnosis.checkup import checkup

    findings = checkup()
    problems = sum(finding.level == "problem" for finding in findings)
    if form == "json":
        found = [asdict(finding) for finding in findings]
        echo_json({"problems": problems, "findings": found})
    else:
        click.echo(as_text(findings, problems))
    if problems:
        click.get_current_context().exit(1)


def as_text(findings: Sequence[Finding], problems: int) -> str:
    lines = []
    for area, members in groupby(findings, key=lambda finding: finding.area):
        lines.append(area)
        for finding in members:
            lines.append(f"  {_MARKS[finding.level]:7}  {finding.found}")
            if finding.cure:
                lines.append(
                    f"           {'cure' if finding.level == 'problem' else 'hint'}: {finding.cure}"
                )
    lines.append("")
    lines.append("nothing is wrong" if not problems else f"{problems} to mend: see PROBLEM")
    return "\n".join(lines)
