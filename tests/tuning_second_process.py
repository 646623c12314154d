"""A tune in a process of its own, on the simulated device; argument: the database."""

from __future__ import annotations

import sys
import time

from tuning_simulation import Simulation
from tuning_world import PROBLEMS, ask, run, times

if __name__ == "__main__":
    sim = Simulation(times)
    sim.on_step = lambda: time.sleep(0.01)
    sys.exit(run(sim, ask(sys.argv[1], PROBLEMS)).exit_code)
