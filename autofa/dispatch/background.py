"""Builds missing winners, imports other libraries and reads a server's rows in background threads:
no call waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

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


class Builder:
    """A queue of variants to build, each at most once per process. Thread-safe.

    The thread starts with the first request and ends when nothing is left. One compilation at a
    time: it runs beside somebody's work. Without a compiler, or where the cache cannot be written,
    it gives up for good; whatever fails, one warning is all that is said of it.
    """

    def __init__(
        self,
        settings: Settings,
        built: Callable[[Request], None],
        is_broken: Callable[[Variant, str], bool],
    ) -> None:
        """Both are called from the thread: `built` after each success, `is_broken` before each
        build: whether a library that is there is to be replaced."""
        self._settings = settings
        self._built = built
        self._is_broken = is_broken
        self._lock = threading.Lock()
        self._waiting: list[Request] = []
        self._seen: set[Request] = set()
        self._thread: threading.Thread | None = None
        self._gave_up = False
        self._warned = False

    def request(self, variant: Variant, target: str) -> None:
        """Asks for a library; at once back. What was asked for before is not asked for again."""
        with self._lock:
            if self._gave_up or (variant, target) in self._seen:
                return
            self._seen.add((variant, target))
            self._waiting.append((variant, target))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="autofa-build", daemon=True)
                self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Waits until all that was asked for is done; False if that takes longer."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def _next(self) -> Request | None:
        with self._lock:
            if self._waiting:
                return self._waiting.pop(0)
            self._thread = None
            return None

    def _run(self) -> None:
        while (request := self._next()) is not None:
            variant, target = request
            try:
                anew = self._is_broken(variant, target)
                result = compiler.build([request], self._settings, jobs=1, anew=anew)[0]
                if result.status == "ok":
                    log.info("built %s for %s", variant, target)
                    self._built(request)
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


class Fetcher:
    """Reads the rows of devices from a server, one after another. Thread-safe."""

    def __init__(
        self,
        gather: Callable[[DeviceKey], Evidence],
        fetched: Callable[[DeviceKey, Evidence], None],
    ) -> None:
        """Both are called from the thread: `gather` once per device, unless the server failed
        before, and `fetched` after each."""
        self._gather = gather
        self._fetched = fetched
        self._lock = threading.Lock()
        self._waiting: list[DeviceKey] = []
        self._thread: threading.Thread | None = None
        self._lost = ""
        self._hurry = threading.Event()

    def request(self, device: DeviceKey) -> None:
        """Asks for a device; at once back."""
        with self._lock:
            self._waiting.append(device)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="autofa-read", daemon=True)
                self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Waits until all that was asked for is there; False if that takes longer."""
        self._hurry.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def _next(self) -> DeviceKey | None:
        with self._lock:
            if self._waiting:
                return self._waiting.pop(0)
            self._thread = None
            return None

    def _run(self) -> None:
        self._hurry.wait(_HEAD_START)
        while (device := self._next()) is not None:
            # A server that failed once is not asked again: each warning and each wait is one.
            found = shipped(device, lost=self._lost) if self._lost else self._gather(device)
            self._lost = found.lost
            try:
                self._fetched(device, found)
            except Exception as error:
                log.warning("measurements of %s were not swapped in: %r", device, error)
