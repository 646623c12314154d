"""The garbage collector, kept from running where many objects are made to stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Within it no collection starts. Thousands of new objects set off a full one, which takes 40
    to 90 ms where torch is loaded, and finds nothing."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
