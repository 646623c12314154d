"""One member of a tune on several simulated devices. What it does wrong is in FANOUT_MISHAP, as
`cuda:1 dies`: it is killed in its second bucket, fails at its start, or exits without a word."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

from tuning_simulation import DEVICE, Simulation
from tuning_world import REGISTRY, times

from autofa.device import DeviceKey
from autofa.errors import DeviceError
from autofa.tuning.lab import Lab
from autofa.tuning.member import serve
from autofa.tuning.request import TuneRequest

OTHER = DeviceKey("cpu", "Another simulated CPU", "x86-64-v3", 4)
KEYS = {"cuda:0": DEVICE, "cuda:1": DEVICE, "cuda:2": OTHER}


@contextmanager
def laboratory(request: TuneRequest) -> Iterator[Lab]:
    device, mishap = os.environ.get("FANOUT_MISHAP", " ").split(" ")
    mishap = mishap if device == request.device else ""
    if mishap == "fails":
        raise DeviceError("this device has gone")
    if mishap == "exits":
        sys.exit("the driver is another one")
    sim = Simulation(times)

    def step() -> None:
        time.sleep(0.01)
        if mishap == "dies" and len({problem for _, problem in sim.timed}) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    sim.on_step = step
    with sim.laboratory(request) as lab:
        yield replace(lab, device=KEYS[request.device])


if __name__ == "__main__":
    serve(Connection(int(sys.argv[-1])), REGISTRY, laboratory)
