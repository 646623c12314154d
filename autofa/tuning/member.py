"""One device's part of a tune on several: a child process, told and heard over one socket.

It dies with its parent, and what it measured until then is in the database.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection

from autofa.errors import AutofaError
from autofa.kernels import REGISTRY, Registry
from autofa.problem import Problem
from autofa.settings import Settings
from autofa.tuning.control import signals_interrupt
from autofa.tuning.events import Event
from autofa.tuning.hardware import open_lab
from autofa.tuning.lab import Lab
from autofa.tuning.request import TuneRequest
from autofa.tuning.session import tune


@dataclass(frozen=True)
class Order:
    """A `TuneRequest` as it travels: without the registry, whose declarations are code.

    Attributes:
        uuid: of the GPU that is meant, whatever its ordinal is there; empty: the ordinal decides.
        deadline: on the monotonic clock, which all processes of a machine share; None: no budget.
    """

    problems: tuple[Problem, ...]
    device: str
    uuid: str
    db: str
    mode: str
    deadline: float | None
    trials: int
    jobs: int | None
    families: tuple[str, ...] | None
    force: bool
    since: str
    workers: int
    dashboard: str | None
    settings: Settings


# What an order has by the same name in a request.
_SHARED = tuple(f.name for f in fields(Order) if f.name not in ("device", "uuid", "deadline"))


def order_of(request: TuneRequest, device: str, uuid: str, deadline: float | None) -> Order:
    """The order for one device of those that do this request together."""
    same = {name: getattr(request, name) for name in _SHARED}
    return Order(device=device, uuid=uuid, deadline=deadline, **same)


def _request_of(order: Order, registry: Registry) -> TuneRequest:
    same = {name: getattr(order, name) for name in _SHARED}
    device = order.device
    if order.uuid:
        from autofa.runtime import devices

        device = devices.cuda_of_uuid(order.uuid)
    budget = None if order.deadline is None else max(0.0, order.deadline - time.monotonic())
    return TuneRequest(device=device, budget_s=budget, registry=registry, **same)


def _watch(connection: Connection) -> None:
    """Ends this process as a signal would, once the parent is gone: it never sends again."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    os.kill(os.getpid(), signal.SIGTERM)


def serve(
    connection: Connection,
    registry: Registry = REGISTRY,
    laboratory: Callable[[TuneRequest], AbstractContextManager[Lab]] = open_lab,
) -> None:
    """Receives an `Order`; sends the tune's events, then its `Summary` or the `AutofaError`."""
    order = connection.recv()
    threading.Thread(target=_watch, args=(connection,), daemon=True).start()

    def tell(message: object) -> None:
        with contextlib.suppress(OSError):  # a parent that is gone: the watch ends this process
            connection.send(message)

    def on_event(event: Event) -> None:
        tell(event)

    try:
        with signals_interrupt():
            summary = tune(_request_of(order, registry), on_event, laboratory=laboratory)
            # A message that is cut in two is no message.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            tell(summary)
    except AutofaError as error:
        tell(error)


def main() -> None:
    """The last argument is the socket's descriptor."""
    serve(Connection(int(sys.argv[-1])))
