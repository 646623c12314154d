"""Compiles variants ahead of their measurement, in a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from autofa import compiler
from autofa.compiler import Build
from autofa.device import Limits
from autofa.errors import ToolchainError
from autofa.kernels.family import Variant
from autofa.settings import Settings

_POLL_S = 0.1


class BuildFunction(Protocol):
    """`autofa.compiler.build`, or what stands in for it."""

    def __call__(
        self,
        requests: Sequence[tuple[Variant, str]],
        settings: Settings,
        *,
        jobs: int | None = None,
        on_done: Callable[[Build], None] | None = None,
    ) -> list[Build]: ...


class Builder:
    """Libraries for one device. Use from one thread; a thread of its own runs the compilers.

    The compiler layer's processes die with this one, however it ends; nothing waits for them.

    Attributes:
        problem: why no compiler can be used; empty as long as none was needed or it works.
        seconds: what the compilers took until now, one after the other.
    """

    def __init__(
        self,
        limits: Limits,
        settings: Settings,
        jobs: int | None,
        build: BuildFunction = compiler.build,
        library_of: Callable[[Variant, str, Settings], Path | None] = compiler.library_of,
    ) -> None:
        self._limits = limits
        self._settings = settings
        self._jobs = jobs
        self._build = build
        self._library_of = library_of
        self._lock = threading.Condition()
        self._wanted: set[str] = set()
        self._done: dict[str, Build] = {}
        self._lost: set[str] = set()
        self._crash: BaseException | None = None
        self._queue: queue.SimpleQueue[list[Variant]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.problem = ""
        self.seconds = 0.0

    def prefetch(self, variants: Iterable[Variant]) -> None:
        """Has these compiled, and returns at once."""
        with self._lock:
            fresh = [v for v in variants if v.slug not in self._wanted]
            self._wanted.update(v.slug for v in fresh)
        if not fresh:
            return
        self._queue.put(fresh)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="autofa-build", daemon=True)
            self._thread.start()

    def cached(self, variant: Variant) -> Path | None:
        """Its library, if it is there without compiling."""
        return self._library_of(variant, variant.target(self._limits), self._settings)

    def waiting(self, variants: Iterable[Variant]) -> int:
        """How many of these are not ready yet."""
        with self._lock:
            return sum(v.slug not in self._done and v.slug not in self._lost for v in variants)

    def take(self, variants: Sequence[Variant], check: Callable[[], None]) -> list[Build]:
        """These, compiled; those that need a compiler where none works are left out, and `problem`
        says why. What has gone from the cache, or was damaged there, is compiled again. `check` is
        called now and then while waiting, and may raise."""
        with self._lock:
            for variant in variants:
                done = self._done.get(variant.slug)
                if done is not None and done.status == "ok" and self.cached(variant) is None:
                    del self._done[variant.slug]
                    self._wanted.discard(variant.slug)
        self.prefetch(variants)
        slugs = [v.slug for v in variants]
        with self._lock:
            while not all(slug in self._done or slug in self._lost for slug in slugs):
                if self._crash is not None:
                    raise self._crash
                self._lock.wait(_POLL_S)
                check()
            return [self._done[slug] for slug in slugs if slug in self._done]

    def _run(self) -> None:
        while True:
            batch = self._queue.get()
            while not self._queue.empty():
                batch += self._queue.get()
            try:
                self._compile(batch)
            except BaseException as error:  # handed to the thread that waits for the result
                with self._lock:
                    self._crash = error
                    self._lock.notify_all()
                return

    def _compile(self, batch: list[Variant]) -> None:
        missing = []
        for variant in batch:
            target = variant.target(self._limits)
            library = self._library_of(variant, target, self._settings)
            if library is None:
                missing.append((variant, target))
            else:
                self._finish(Build(variant, target, "ok", library, True, 0.0, "", None))
        if not missing:
            return
        try:
            self._build(missing, self._settings, jobs=self._jobs, on_done=self._finish)
        except ToolchainError as error:
            with self._lock:
                self.problem = str(error)
                self._lost.update(v.slug for v, _ in missing if v.slug not in self._done)
                self._lock.notify_all()

    def _finish(self, build: Build) -> None:
        with self._lock:
            self._done[build.variant.slug] = build
            self.seconds += build.seconds
            self._lock.notify_all()
