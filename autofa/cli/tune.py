"""`autofa tune`: measures this machine, once; what is known already is not measured again."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from dataclasses import replace

import click

from autofa.cli.options import database_of, db_option, mode_option, read_settings, split_names
from autofa.cli.progress import shown, shown_together
from autofa.cli.streams import go_to_one_place
from autofa.device import DeviceKey
from autofa.problem import Problem, parse_dtype
from autofa.tuning.control import signals_interrupt
from autofa.tuning.events import BucketDone, Event
from autofa.tuning.request import TuneRequest, make_request


def _device(asked: str | None) -> str:
    from autofa.runtime import devices

    if asked is None:
        problem = devices.cuda_problem()
        if problem is not None:
            click.echo(f"no usable CUDA GPU: {problem}; profiling the CPU", err=True)
    return str(devices.find_device(asked))


@click.command()
@click.option(
    "--gpu-profile",
    "profile",
    is_flag=False,
    flag_value="default",
    metavar="[quick|default|full|FILE.toml]",
    help="Tune the whole profile of this machine's GPU (of its CPU where there is none).",
)
@click.option(
    "--shape", "shapes", multiple=True, metavar="B,H,N,D", help="Tune exactly this shape."
)
@click.option(
    "--device",
    metavar="cuda:0|cuda|cpu|all",
    help="Which device (default: the first GPU); all: every GPU at once.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    help="f32, f16 or bf16, repeatable (of --shape: f32 on CPU, f16 on CUDA).",
)
@click.option(
    "--causal/--no-causal",
    default=None,
    help="Only causal, or only dense problems (of --shape: dense).",
)
@mode_option
@click.option("--budget", metavar="90s|10m|1h", help="Wall time of the whole tune.")
@click.option("--trials", type=click.IntRange(min=1), help="Own variants tried per bucket.")
@click.option("--jobs", type=click.IntRange(min=1), help="Parallel compilations.")
@click.option("--families", metavar="NAME,...", help="Only these kernel families.")
@click.option("--force", is_flag=True, help="Measure again what is known already.")
@click.option(
    "--dashboard",
    type=click.Path(dir_okay=False),
    help="Also keep the search in a file that `optuna-dashboard FILE` shows while it runs.",
)
@db_option
def tune(
    profile: str | None,
    shapes: tuple[str, ...],
    device: str | None,
    dtypes: tuple[str, ...],
    causal: bool | None,
    mode: str,
    budget: str | None,
    trials: int | None,
    jobs: int | None,
    families: str | None,
    force: bool,
    dashboard: str | None,
    db: str | None,
) -> None:
    """Measure every candidate kernel and keep the results.

    Needed once per machine. Without a profile or a shape the profile is `default`. Stop it at any
    time: the same command goes on where it stopped.
    """
    settings = read_settings()

    def request_on(where: str) -> TuneRequest:
        return make_request(
            profile,
            shapes=shapes,
            device=where,
            dtypes=[parse_dtype(d) for d in dtypes] or None,
            causal=causal,
            mode=mode,
            budget=budget,
            trials=trials,
            jobs=jobs,
            families=split_names(families),
            db=database_of(settings, db),
            force=force,
            dashboard=dashboard,
            settings=settings,
        )

    # Arguments are checked before torch is loaded and the device looked for.
    request = request_on("cpu" if device == "cpu" else "cuda")
    if dashboard is not None:
        click.echo(_how_to_watch(dashboard), err=True)
    if device is not None and device.strip().lower() == "all":
        code = _tune_all(request)
    else:
        code = _tune(request_on(_device(device)))
    if code == 0:
        click.echo("`autofa report` shows the leaderboard", err=True)
    sys.exit(code)


def _how_to_watch(dashboard: str) -> str:
    missing = importlib.util.find_spec("optuna_dashboard") is None
    install = " (it is not installed here: `pip install 'autofa[dashboard]'`)" if missing else ""
    return f"`optuna-dashboard {shlex.quote(dashboard)}` shows the search{install}"


def _tune(request: TuneRequest) -> int:
    """Prints the summary; gives the exit code."""
    from autofa.tuning.session import tune as run

    told: set[Problem] = set()
    with signals_interrupt(), shown() as show:

        def on_event(event: Event) -> None:
            show(event)
            if isinstance(event, BucketDone):
                told.add(event.result.problem)

        summary = run(request, on_event)
    click.echo(summary.text(told if go_to_one_place(sys.stdout, sys.stderr) else ()))
    return summary.exit_code


def _tune_all(request: TuneRequest) -> int:
    """The same on every GPU at once; where there is one only, nothing but that."""
    from autofa.tuning.fanout import Member, fan_out, gpus

    members = gpus()
    if len(members) == 1:
        return _tune(replace(request, device=members[0].device))
    told: dict[DeviceKey, set[Problem]] = {member.key: set() for member in members}
    with shown_together() as listener:
        shows = {member: listener(member.device) for member in members}

        def on_event(member: Member, event: Event) -> None:
            shows[member](event)
            if isinstance(event, BucketDone):
                told[member.key].add(event.result.problem)

        summary = fan_out(request, members, on_event)
    click.echo(summary.text(told if go_to_one_place(sys.stdout, sys.stderr) else {}))
    return summary.exit_code
