"""Whether candidates are right, and how fast they are: reference, timing, isolated worker.

`Worker` is all that tuning needs. It runs every candidate in a process of its own, and tells of
crashes, hangs and wrong numbers as data. Importing this loads no torch.
"""

from __future__ import annotations

from autofa.bench.client import Entrant, Worker, WorkerOptions
from autofa.bench.protocol import Outcome, Plan, Timing, TimingRun

__all__ = ["Entrant", "Outcome", "Plan", "Timing", "TimingRun", "Worker", "WorkerOptions"]
