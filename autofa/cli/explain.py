"""`autofa explain`: which kernel a call would get, from which rung of the ladder, and why."""

from __future__ import annotations

from dataclasses import replace

import click

from autofa.cli.options import default_dtype, device_option, mode_option, shape_option
from autofa.problem import parse_dtype, parse_shape


@click.command()
@shape_option(required=True, multiple=False)
@click.option("--dtype", help="f32, f16 or bf16 (default: f16 on a GPU, f32 on a CPU).")
@click.option("--causal/--no-causal", default=False, help="Causal mask, upper-left as in torch.")
@mode_option
@device_option()
def explain(shape: str, dtype: str | None, causal: bool, mode: str, device: str | None) -> None:
    """Say which kernel `autofa.attention` uses for a shape, as a JSON object.

    Candidates are ordered by `speedup`, which is taken within rounds that plain SDPA shared. Their
    times may come from different runs, and are no measure of which is faster.
    """
    if dtype is not None:
        parse_dtype(dtype)  # the names are checked before the device is looked for
    problem = parse_shape(shape, mask="causal" if causal else "none")
    from autofa.dispatch.inspection import explain_problem
    from autofa.runtime import devices

    where = devices.find_device(device)
    wanted = parse_dtype(dtype or default_dtype(where.type))
    problem = replace(problem, dtype=wanted, device=where.type)
    found = explain_problem(problem, devices.device_key(where), devices.limits(where), mode)
    click.echo(found.to_json())
