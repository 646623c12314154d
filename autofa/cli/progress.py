"""What a tune shows while it runs: a live bar per device on a terminal, else a line per bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from autofa.cli.options import duration
from autofa.tuning.events import (
    BucketDone,
    BucketResult,
    BucketStarted,
    Building,
    CandidateDone,
    Estimate,
    Event,
    Notice,
    OnEvent,
    TuneStarted,
)


def _bucket_line(result: BucketResult) -> str:
    p = result.problem
    shape = f"{p.shape} {p.dtype} {p.mask}"
    if result.winner is None:
        return f"{shape}: no result ({result.failed} failed)"
    gain = "" if result.speedup is None else f"  {result.speedup:.2f}x of torch.sdpa"
    failed = f", {result.failed} failed" if result.failed else ""
    counted = f"{result.measured} measured{failed}, {duration(result.seconds)}"
    counted += "" if result.complete else "; in part"
    return f"{shape}: {result.winner}{gain}  ({counted})"


class _Remaining(ProgressColumn):
    """The tuner's own estimate of the time to go, which knows what the work is."""

    def render(self, task: Task) -> Text:
        seconds = task.fields.get("remaining")
        return Text("" if seconds is None else f"about {duration(seconds)} left")


@contextmanager
def shown() -> Iterator[OnEvent]:
    """Gives the listener that prints a tune's events to stderr."""
    with shown_together() as listener:
        yield listener("")


@contextmanager
def shown_together() -> Iterator[Callable[[str], OnEvent]]:
    """Gives what makes listeners, one for each device by its name, which begins its lines."""
    console = Console(stderr=True, highlight=False)
    bar = Progress(
        TextColumn("{task.fields[device]}"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        _Remaining(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield partial(_listener, console, bar)


def _listener(console: Console, bar: Progress, device: str) -> OnEvent:
    task = bar.add_task("planning", total=None, device=device)
    prefix = f"{device}: " if device else ""

    def say(text: str) -> None:
        console.print(escape(prefix + text), soft_wrap=True)

    def on_event(event: Event) -> None:
        if isinstance(event, TuneStarted):
            known = f", {event.done} known already" if event.done else ""
            say(f"{event.device}: {event.buckets} buckets{known}; database {event.db}")
            bar.update(task, total=event.buckets, completed=event.done)
        elif isinstance(event, BucketStarted):
            p = event.problem
            what = "re-timing" if event.retime else "measuring"
            bar.update(task, description=escape(f"{what} {p.shape} {p.dtype} {p.mask}"))
        elif isinstance(event, Building):
            bar.update(task, description=f"compiling {event.count} variants")
        elif isinstance(event, CandidateDone):
            if event.status != "ok":
                say(f"  {event.slug}: {event.status}: {event.message}")
            elif console.is_terminal:
                gain = "" if event.speedup is None else f" {event.speedup:.2f}x"
                bar.update(task, description=escape(f"{event.slug}{gain}"))
        elif isinstance(event, BucketDone):
            say(_bucket_line(event.result))
        elif isinstance(event, Estimate):
            bar.update(task, completed=event.done, total=event.total, remaining=event.remaining_s)
        elif isinstance(event, Notice):
            say(f"note: {event.message}")

    return on_event
