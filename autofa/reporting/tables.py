"""Entries as text: tables for people, and CSV, strict JSON and HTML for tools.

No cell is ever cut, whatever the width of the terminal. What we write ourselves is ASCII; what
comes from data keeps its letters, less control characters, which could steer a terminal.
"""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from tabulate import tabulate

from autofa.problem import Bucket
from autofa.reporting.leaderboard import BUCKET_FIELDS, Entry

FORMATS = ("simple", "github", "csv", "json", "html")
NOTHING = "Nothing tuned yet for this device: run `autofa tune --gpu-profile quick`."

_MEASURED = (
    "rank", "kernel", "title", "family", "status", "time_ms", "call_ms", "tflops",
    "speedup_vs_sdpa", "error", "current", "tied", "disturbed", "note",
)  # fmt: skip
_CSV_FIELDS = ("device", "arch", "units", *BUCKET_FIELDS, *_MEASURED)
_HEADERS = ("#", "kernel", "slug", "time ms", "call ms", "TFLOPS", "x SDPA", "error", "note")
_ALIGN = ("right", "left", "left", "right", "right", "right", "right", "right", "left")
_STYLE = (
    "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;margin-bottom:2em}"
    "td,th{padding:.2em .8em;border-bottom:1px solid #ccc;text-align:left}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}"
)


def render(
    entries: Sequence[Entry],
    form: str,
    *,
    mode: str,
    stale: int = 0,
    nothing: str = NOTHING,
) -> str:
    """The leaderboard in one of `FORMATS`, ending in a newline.

    Args:
        stale: how many measurements were left out because they may not be used any more.
        nothing: the sentence that people get instead of an empty table.
    """
    if form == "json":
        return json.dumps([document(entry) for entry in entries], indent=1, allow_nan=False) + "\n"
    if form == "csv":
        return _csv(entries)
    if form == "html":
        return _html(entries, mode, nothing)
    blocks = [] if entries else [nothing]
    for device, on_device in groupby(entries, key=lambda entry: entry.device):
        blocks.append(f"{'## ' if form == 'github' else ''}{_plain(str(device))}, ranked by {mode}")
        for bucket, members in groupby(on_device, key=lambda entry: entry.bucket):
            heading = f"{'### ' if form == 'github' else ''}{_heading(bucket)}"
            rows = [[_cell(form, text) for text in _cells(entry)] for entry in members]
            blocks.append(f"{heading}\n{_blank(form)}{_table(rows, _HEADERS, _ALIGN, form)}")
    if any(entry.tied and entry.rank != 1 for entry in entries):
        blocks.append("=: not slower than the fastest by more than the noise; the simplest is used")
    if stale:
        blocks.append(f"{stale} older measurements no longer hold (--all shows them): tune again.")
    return "\n\n".join(blocks) + "\n"


def summary(entries: Sequence[Entry], *, mode: str) -> str:
    """One line per entry, for the winners at the end of a tune."""
    rows = [
        [
            _heading(entry.bucket),
            _plain(entry.kernel),
            _milliseconds(entry.milliseconds(mode)),
            _number(entry.tflops, 2),
            _number(entry.speedup_vs_sdpa, 2),
        ]
        for entry in entries
    ]
    headers = ("shape", "kernel", f"{'call' if mode == 'eager' else 'time'} ms", "TFLOPS", "x SDPA")
    return _table(rows, headers, ("left", "left", "right", "right", "right"), "simple") + "\n"


def document(entry: Entry) -> dict[str, object]:
    """The entry as `report --format json` and `bench --format json` print it."""
    found: dict[str, object] = {
        "device": entry.device.name,
        "arch": entry.device.arch,
        "units": entry.device.units,
        "bucket": {name: getattr(entry.bucket, name) for name in BUCKET_FIELDS},
    }
    return found | {name: getattr(entry, name) for name in _MEASURED}


@dataclass(frozen=True)
class Contender:
    """One kernel of a head-to-head: its entry, and the first values of its output."""

    entry: Entry
    values: tuple[float, ...] = ()


def head_to_head(contenders: Sequence[Contender], *, mode: str, show_all: bool = True) -> str:
    """One line per kernel in the order given: first values, time, TFLOPS, +% over the best so far.

    Args:
        show_all: False leaves out kernels that do not beat the best so far.
    """
    lines = []
    best: float | None = None
    width = max((len(_label(c.entry)) for c in contenders), default=0)
    for contender in contenders:
        entry = contender.entry
        took = entry.milliseconds(mode)
        label = _label(entry).rjust(width)
        if entry.status != "ok" or took is None:
            if show_all:
                lines.append(f"{label}: {entry.status}: {_plain(entry.note)}".rstrip(": "))
            continue
        gain = "" if best is None else f" ({(best / took - 1) * 100:+.2f}%)"
        if show_all or best is None or took < best:
            values = ", ".join(f"{value:>11.8f}" for value in contender.values)
            error = "" if entry.error is None else f", error: {entry.error:.1e}"
            lines.append(
                f"{label}: [{values}], time: {_milliseconds(took)} ms,"
                f" TFLOPS: {_number(entry.tflops, 2)}{gain}{error}"
            )
        best = took if best is None else min(best, took)
    return "".join(f"{line}\n" for line in lines)


def fit(text: str, encoding: str | None) -> str:
    """`text` less what the stream's encoding cannot carry, so that writing it never fails."""
    name = encoding or "ascii"
    return text.encode(name, "replace").decode(name)


def _label(entry: Entry) -> str:
    # A vendor kernel is its own family; variants of one title differ in their slugs.
    own = entry.kernel != entry.family
    return _plain(f"{entry.title} {entry.kernel}" if own else entry.title)


def _heading(bucket: Bucket) -> str:
    return f"{bucket.problem.shape} {bucket.dtype} {bucket.mask.replace('none', 'dense')}"


def _table(
    rows: Sequence[Sequence[str]], headers: Sequence[str], align: Sequence[str], form: str
) -> str:
    # Numbers are formatted already; tabulate would read a slug like 1e5 as one.
    return tabulate(
        rows,
        headers=headers,
        tablefmt=form,
        colalign=align if rows else None,
        disable_numparse=True,
        preserve_whitespace=False,
    )


def _blank(form: str) -> str:
    return "\n" if form == "github" else ""


def _cell(form: str, text: str) -> str:
    return text.replace("|", "\\|") if form == "github" else text


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _cells(entry: Entry) -> list[str]:
    place = "-" if entry.rank is None else str(entry.rank)
    notes = [
        "" if entry.status == "ok" else entry.status,
        "stale" if entry.status == "ok" and not entry.usable else "",
        "not current" if entry.usable and not entry.current else "",
        _plain(entry.note),
    ]
    return [
        f"{place} =" if entry.tied and entry.rank != 1 else place,
        _plain(entry.title),
        _plain(entry.kernel),
        _milliseconds(entry.time_ms),
        _milliseconds(entry.call_ms),
        _number(entry.tflops, 2),
        _number(entry.speedup_vs_sdpa, 2),
        "-" if entry.error is None else f"{entry.error:.1e}",
        ": ".join(filter(None, notes)),
    ]


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 1000 else f"{value:.3f}" if value >= 1 else f"{value:.4f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _csv(entries: Sequence[Entry]) -> str:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)  # its default dialect is RFC 4180
    writer.writerow(_CSV_FIELDS)
    for entry in entries:
        fields = document(entry)
        fields |= {name: getattr(entry.bucket, name) for name in BUCKET_FIELDS}
        fields["current"] = "true" if entry.current else "false"
        fields["tied"] = "true" if entry.tied else "false"
        fields["disturbed"] = "true" if entry.disturbed else "false"
        writer.writerow(["" if fields[n] is None else fields[n] for n in _CSV_FIELDS])
    return stream.getvalue()


def _html(entries: Sequence[Entry], mode: str, nothing: str) -> str:
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        f"<title>autofa leaderboard</title><style>{_STYLE}</style></head><body>",
        "" if entries else f"<p>{html.escape(nothing)}</p>",
    ]
    for device, on_device in groupby(entries, key=lambda entry: entry.device):
        parts.append(f"<h1>{html.escape(_plain(str(device)))}, ranked by {mode}</h1>")
        for bucket, members in groupby(on_device, key=lambda entry: entry.bucket):
            parts.append(f"<h2>{html.escape(_heading(bucket))}</h2><table>")
            parts.append(f"<tr>{''.join(f'<th>{name}</th>' for name in _HEADERS)}</tr>")
            for entry in members:
                cells = (
                    f"<td{' class=n' if align == 'right' else ''}>{html.escape(text)}</td>"
                    for text, align in zip(_cells(entry), _ALIGN, strict=True)
                )
                parts.append(f"<tr>{''.join(cells)}</tr>")
            parts.append("</table>")
    return "\n".join(filter(None, parts)) + "\n</body></html>\n"
