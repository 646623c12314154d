"""Builds missing winners, imports other libraries and reads a server's rows in background threads:
no call waits."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from autofa import compiler
from autofa.device import DeviceKey
from autofa.dispatch.evidence import shipped
from autofa.dispatch.ladder import Evidence
from autofa.errors import DOCTOR, AutofaError
from autofa.kernels.family import Variant
from autofa.runtime import vendors
from autofa.settings import Settings

log = logging.getLogger("autofa")

Request = tuple[Variant, str]
Item = TypeVar("Item")


class _Worker(Generic[Item]):
    """A queue and the thread that works it off, one item after another. Thread-safe.

    The thread starts with the first item and ends when nothing is left.
    """

    _name = ""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Item] = []
        self._thread: threading.Thread | None = None

    def _enqueue(self, item: Item) -> None:
        """With the lock held."""
        self._waiting.append(item)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Waits until all that was asked for is done; False if that takes longer."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                item = self._waiting.pop(0)
            self._do(item)

    def _do(self, item: Item) -> None:
        """Does one; raises nothing."""
        raise NotImplementedError


def _prepare_tempfile() -> None:
    """A fork while the thread is in `tempfile` for the first time would leave its lock taken in the
    child, which then waits for ever; after the first time it takes none."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix="autofa-"):
        pass


class Builder(_Worker[Request]):
    """Builds variants, each at most once per process.

    One compilation at a time: it runs beside somebody's work. Without a compiler, or where the
    cache cannot be written, it gives up for good; whatever fails, one warning is all that is said
    of it.
    """

    _name = "autofa-build"

    def __init__(
        self,
        settings: Settings,
        built: Callable[[Request], None],
        is_broken: Callable[[Variant, str], bool],
    ) -> None:
        """Both are called from the thread: `built` after each success, `is_broken` before each
        build: whether a library that is there is to be replaced."""
        super().__init__()
        self._settings = settings
        self._built = built
        self._is_broken = is_broken
        self._seen: set[Request] = set()
        self._gave_up = False
        self._warned = False

    def request(self, variant: Variant, target: str) -> None:
        """Asks for a library; at once back. What was asked for before is not asked for again."""
        with self._lock:
            if self._gave_up or (variant, target) in self._seen:
                return
            if not self._seen:
                _prepare_tempfile()
            self._seen.add((variant, target))
            self._enqueue((variant, target))

    def _do(self, item: Request) -> None:
        variant, target = item
        try:
            anew = self._is_broken(variant, target)
            result = compiler.build([item], self._settings, jobs=1, anew=anew)[0]
            if result.status == "ok":
                log.info("built %s for %s", variant, target)
                self._built(item)
            else:
                self._complain(variant, result.message)
        except AutofaError as error:
            # All others would fail for the same reason.
            with self._lock:
                self._gave_up = True
                self._waiting.clear()
            self._complain(variant, str(error))
        except Exception as error:
            self._complain(variant, repr(error))

    def _complain(self, variant: Variant, why: str) -> None:
        level = logging.INFO if self._warned else logging.WARNING
        self._warned = True
        say = "%s would be the fastest, but was not built: %s; another kernel answers; %s"
        log.log(level, say, variant, why, DOCTOR)


class Importer:
    """Loads vendor kernels whose library is to be imported, each once. Thread-safe."""

    def __init__(self, loaded: Callable[[str], None]) -> None:
        """`loaded` is called from a thread of its own, after success and failure alike."""
        self._loaded = loaded
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}

    def request(self, slug: str) -> None:
        """Asks for a kernel; at once back. What was asked for before is not asked for again."""
        with self._lock:
            if slug not in self._threads:
                name = f"autofa-import-{slug}"
                thread = threading.Thread(target=self._run, args=(slug,), name=name, daemon=True)
                self._threads[slug] = thread
                thread.start()

    def wait(self, timeout: float) -> bool:
        """Waits until all that was asked for is done; False if that takes longer."""
        with self._lock:
            threads = tuple(self._threads.values())
        for thread in threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in threads)

    def _run(self, slug: str) -> None:
        try:
            vendors.load(slug)
        except AutofaError as error:
            log.warning("%s; another kernel answers", error)
        try:
            self._loaded(slug)
        except Exception as error:
            log.warning("%s was not swapped in: %r", slug, error)


# The interpreter belongs to the first call, which is still importing what it needs: with psycopg's
# import beside it, it took 30% longer.
_HEAD_START = 0.2


class Fetcher(_Worker[DeviceKey]):
    """Reads the rows of devices from a server."""

    _name = "autofa-read"

    def __init__(
        self,
        gather: Callable[[DeviceKey], Evidence],
        fetched: Callable[[DeviceKey, Evidence], None],
    ) -> None:
        """Both are called from the thread: `gather` once per device, unless the server failed
        before, and `fetched` after each."""
        super().__init__()
        self._gather = gather
        self._fetched = fetched
        self._lost = ""
        self._hurry = threading.Event()

    def request(self, device: DeviceKey) -> None:
        """Asks for a device; at once back."""
        with self._lock:
            self._enqueue(device)

    def wait(self, timeout: float) -> bool:
        self._hurry.set()
        return super().wait(timeout)

    def _run(self) -> None:
        self._hurry.wait(_HEAD_START)
        super()._run()

    def _do(self, item: DeviceKey) -> None:
        # A server that failed once is not asked again: each warning and each wait is one.
        found = shipped(item, lost=self._lost) if self._lost else self._gather(item)
        self._lost = found.lost
        try:
            self._fetched(item, found)
        except Exception as error:
            log.warning("measurements of %s were not swapped in: %r", item, error)
