"""`autofa.tune`: the tuner as a Python call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autofa import settings
from autofa.dispatch import state
from autofa.runtime import devices
from autofa.tuning.control import Interrupted
from autofa.tuning.events import Summary
from autofa.tuning.request import make_request
from autofa.tuning.session import tune as run_tune


def tune(
    profile: str | None = None,
    *,
    shapes: Sequence[str] = (),
    device: str | None = None,
    dtypes: Sequence[str] | None = None,
    causal: bool | None = None,
    budget: str | float | None = None,
    trials: int | None = None,
    db: str | None = None,
) -> Summary:
    """Measures every candidate kernel on this machine and stores the results.

    What the database holds already is not measured again, so a second call ends at once and an
    interrupted one goes on. `autofa.attention` uses the results from its next process on, or after
    `autofa.reload()`. Kernels that accumulate in less than f32 are tried only where
    `set_precision("fast")` or AUTOFA_PRECISION admits them.

    Args:
        profile: `quick`, `default`, `full`, or a path to a TOML file; `default` if there are no
            shapes either.
        shapes: `B,H,N,D` or `B,Hq/Hkv,Nq/Nk,D/Dv`, measured exactly; before the profile's.
        device: as torch writes it; the first GPU if there is one, else the CPU.
        dtypes: `f32`, `f16`, `bf16`, instead of the profile's; a shape alone is f16 on a GPU, f32
            on a CPU.
        causal: only causal, or only dense, instead of the profile's; a shape alone is dense.
        budget: wall time of the whole call: `90s`, `10m`, `1h`, or seconds.
        trials: own kernels tried per bucket.
        db: path or URL of the database; AUTOFA_DB by default.

    Raises:
        UsageError: an argument is wrong, the device is not there, or nothing fits into memory.
        StoreError: the database cannot be used.
        KeyboardInterrupt: after Ctrl-C; the results so far are stored.
    """
    found = devices.find_device(device)
    here = settings.load()
    request = make_request(
        profile,
        shapes=shapes,
        device=str(found),
        dtypes=dtypes,
        causal=causal,
        budget=budget,
        trials=trials,
        db=db,
        settings=replace(here, precision=state.precision(here)),
    )
    summary = run_tune(request)
    if summary.interrupted is not None:
        raise Interrupted(summary.interrupted)
    return summary
